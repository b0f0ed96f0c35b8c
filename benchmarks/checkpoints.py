"""What a checkpoint after every step costs.

    python benchmarks/checkpoints.py                                        # two gloo ranks
    python benchmarks/checkpoints.py --model 1b --context 16384 --share-gpu # GPU ranks

One run, in which blocks of steps with a checkpoint after each of them and blocks of steps without
any take turns. A step is measured from the end of the previous one, so it includes the copy of the
state and, if the previous checkpoint is still being written, the wait for it. The first step of a
block is left out: it may pay for the block before.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from contextlib import nullcontext
from datetime import date
from pathlib import Path
from statistics import median, quantiles
from unittest.mock import patch

import torch

from distca.runtime.launch import launch
from distca.runtime.launched import is_rank
from distca.runtime.shared_gpu import share_gpu
from distca.train.config import Config, TrainSection
from distca.train.setup import join_world
from distca.train.trainer import Trainer

RESULTS = Path(__file__).parent / "results"
BLOCK, BLOCKS = 6, 8


def saves(step: int) -> bool:
    return step // BLOCK % 2 == 1


def train(options: argparse.Namespace) -> None:
    """Trains as one rank; rank 0 writes the seconds of all steps."""
    torch.set_num_threads(1)
    join_world()
    config = Config.read(
        None,
        [
            f"model.name={options.model}",
            f"model.sizes={options.sizes}",
            f"data.context={options.context}",
            f"train.tokens_per_step={options.ranks * options.context}",
            f"train.steps={BLOCK * BLOCKS}",
            "train.keep=1",
            f"out={options.out / 'run'}",
            "resume=false",
        ],
    )
    with patch.object(TrainSection, "saves_after", lambda _, step: saves(step)):
        trainer = Trainer(config)
        seconds, last = [], time.perf_counter()
        for _ in trainer.steps():
            now = time.perf_counter()
            seconds.append(now - last)
            last = now
    if trainer.context.rank == 0:
        record = {
            "seconds": seconds,
            "parameters": trainer.model_config.num_parameters,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
        }
        (options.out / "seconds.json").write_text(json.dumps(record))
    torch.distributed.destroy_process_group()


def report(options: argparse.Namespace, command: str) -> None:
    record = json.loads((options.out / "seconds.json").read_text())
    steps = [(n, s) for n, s in enumerate(record.pop("seconds")) if n % BLOCK]
    sides = {
        name: [s for n, s in steps if saves(n) == saving]
        for name, saving in (("without", False), ("with", True))
    }
    ratio = median(sides["with"]) / median(sides["without"])
    saved = 12 * record["parameters"]
    about = (
        f"{date.today()}, torch {torch.__version__}, {options.ranks} ranks on"
        f" {record['device'] or platform.machine() + ' CPU'}, {record['parameters'] / 1e6:.0f} M"
        f" parameters ({saved / 1e9:.2f} GB in a checkpoint)"
    )
    lines = [
        "# A checkpoint after every step",
        "",
        f"{about}: `{command}`",
        "",
        "| steps | median (s) | middle half (s) |",
        "|---|---|---|",
    ]
    for name, seconds in sides.items():
        low, _, high = quantiles(seconds, n=4)
        lines.append(f"| {name} | {median(seconds):.3f} | {low:.3f} to {high:.3f} |")
    lines += ["", f"A step with a checkpoint takes {ratio:.3f} of one without."]
    print("\n".join(lines))
    name = "checkpoints_gpu" if record["device"] else "checkpoints"
    options.results.mkdir(exist_ok=True, parents=True)
    (options.results / f"{name}.md").write_text("\n".join(lines) + "\n")
    result = record | {"about": about, "command": command, "sides": sides, "ratio": ratio}
    (options.results / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--model", default="debug")
    parser.add_argument("--sizes", default="{}")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--share-gpu", action="store_true")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if is_rank():
        train(options)
        return
    command = " ".join(["python benchmarks/checkpoints.py", *sys.argv[1:]])
    with tempfile.TemporaryDirectory() as folder:
        options.out = Path(folder)
        ranks = [sys.executable, __file__, *sys.argv[1:], "--out", folder]
        sharing = share_gpu(options.ranks, options.out / "mps")
        with sharing if options.share_gpu else nullcontext() as gpu:
            stopped = launch(ranks, options.ranks, options.out / "logs", gpu)
        if stopped is None:
            report(options, command)


if __name__ == "__main__":
    main()
