"""One training run in which blocks of steps with something and blocks without it take turns.

So other load on the machine affects both. All steps have the same documents, with lengths of
``pretrain``, in another order, so that they have equally much to compute. A step is measured from
the end of the previous one. The first steps of a block are left out: they may pay for the block
before, or have its plans.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np
import torch

from distca.data.lengths import distribution
from distca.runtime.launch import launch
from distca.runtime.launched import is_rank
from distca.runtime.shared_gpu import share_gpu
from distca.runtime.world import join_world
from distca.train.config import Config
from distca.train.trainer import Trainer

RESULTS = Path(__file__).parent / "results"
VOCABULARY = 256
IsOn = Callable[[int], bool]  # whether a step has it


@dataclass(frozen=True)
class Question:
    """What is compared.

    what: the thing that some steps have, as in "A step with ... takes 1.02 of one without".
    settings: of the run, beside its sizes.
    switched: lets the steps have it for which its argument is true.
    block, skipped: steps of a block, and how many of them are left out.
    """

    name: str
    title: str
    what: str
    settings: tuple[str, ...]
    switched: Callable[[IsOn], AbstractContextManager[Any]]
    block: int
    skipped: int
    blocks: int = 8

    def is_on(self, step: int) -> bool:
        return step // self.block % 2 == 1

    def sides(self, seconds: list[float]) -> dict[str, list[float]]:
        """Returns the seconds of the steps that count, without it and with it."""
        steps = [(n, s) for n, s in enumerate(seconds) if n % self.block >= self.skipped]
        return {
            name: [s for n, s in steps if self.is_on(n) == on]
            for name, on in (("without", False), ("with", True))
        }


def main(question: Question, script: str) -> None:
    parser = argparse.ArgumentParser(description=question.title)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--model", default="debug")
    parser.add_argument("--sizes", default="{}")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--share-gpu", action="store_true")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)  # of the ranks
    options = parser.parse_args()
    if is_rank():
        _train(question, options)
        return
    command = " ".join([f"python benchmarks/{Path(script).name}", *sys.argv[1:]])
    with tempfile.TemporaryDirectory() as folder:
        options.out = Path(folder)
        _write_documents(options)
        ranks = [sys.executable, script, *sys.argv[1:], "--out", folder]
        sharing = share_gpu(options.ranks, options.out / "mps")
        with sharing if options.share_gpu else nullcontext() as gpu:
            stopped = launch(ranks, options.ranks, options.out / "logs", gpu)
        if stopped is None:
            _report(question, options, command)


def _write_documents(options: argparse.Namespace) -> None:
    """Writes documents whose tokens are those of one step, so that a step is an epoch."""
    tokens = options.ranks * options.context
    lengths = distribution("pretrain", options.context).batch(tokens, seed=0)
    np.save(options.out / "tokens.npy", np.random.default_rng(0).integers(0, VOCABULARY, tokens))
    np.save(options.out / "tokens.lengths.npy", lengths)


def _train(question: Question, options: argparse.Namespace) -> None:
    """Trains as one rank; rank 0 writes the seconds of all steps."""
    torch.set_num_threads(1)
    join_world()
    sizes = (
        f"model.name={options.model}",
        f"model.sizes={options.sizes}",
        f"data.sources={options.out / 'tokens.npy'}",
        f"data.tokenizer=ids:{VOCABULARY}",
        f"data.context={options.context}",
        f"train.tokens_per_step={options.ranks * options.context}",
        f"train.steps={question.block * question.blocks}",
        f"out={options.out / 'run'}",
        "resume=false",
    )
    config = Config.read(None, [*sizes, *question.settings])
    with question.switched(question.is_on):
        trainer = Trainer(config)
        seconds, speeds, last = [], [], time.perf_counter()
        for step in trainer.steps():
            now = time.perf_counter()
            seconds.append(now - last)
            speeds.append(step["speeds"])
            last = now
    if trainer.context.rank == 0:
        record = {
            "seconds": seconds,
            "speeds": speeds,  # with which each step was planned
            "parameters": trainer.model_config.num_parameters,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
        }
        (options.out / "seconds.json").write_text(json.dumps(record))
    torch.distributed.destroy_process_group()


def _report(question: Question, options: argparse.Namespace, command: str) -> None:
    record = json.loads((options.out / "seconds.json").read_text())
    sides = question.sides(record.pop("seconds"))
    ratio = median(sides["with"]) / median(sides["without"])
    about = (
        f"{date.today()}, torch {torch.__version__}, {options.ranks} ranks on"
        f" {record['device'] or platform.machine() + ' CPU'}, {record['parameters'] / 1e6:.0f} M"
        " parameters"
    )
    lines = [
        f"# {question.title}",
        "",
        f"{about}: `{command}`",
        "",
        "| steps | number | median (s) | middle half (s) |",
        "|---|---|---|---|",
    ]
    for name, seconds in sides.items():
        low, _, high = quantiles(seconds, n=4)
        lines.append(
            f"| {name} | {len(seconds)} | {median(seconds):.3f} | {low:.3f} to {high:.3f} |"
        )
    lines += ["", f"A step with {question.what} takes {ratio:.3f} of one without."]
    print("\n".join(lines))
    name = f"{question.name}_gpu" if record["device"] else question.name
    options.results.mkdir(exist_ok=True, parents=True)
    (options.results / f"{name}.md").write_text("\n".join(lines) + "\n")
    result = record | {"about": about, "command": command, "sides": sides, "ratio": ratio}
    (options.results / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
