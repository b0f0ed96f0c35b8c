"""TRL's SFTTrainer on uneven conversations, with sdpa and with distca: 2 ranks, one thread each.

    python benchmarks/trl_cpu.py            about ten minutes
    python benchmarks/trl_cpu.py --steps 2  quicker, noisier

It needs ``pip install 'distca[trl]'``. All sides use the same small Llama and the same rows, and
alternate step by step in one run, so that other load on the machine affects all of them. Lengths
are fixed below: the long rows are on one rank in every step, as they would be in some steps.

- *padded*, *padding-free*: TRL's own modes with transformers' sdpa.
- *packing*: TRL's best-fit packing with sdpa, which distributes rows by itself.
- *distca, padding-free* and *distca, packing*: the same batches with attn_implementation="distca".
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers_cpu import MODEL, RESULTS, WARM_UP, Turns, gain, guarded, model_with, watching

ROWS = ([2048, 128, 96, 64], [256, 192, 128, 64])  # tokens of the rows of each rank, in every step
PACKED = 2048  # tokens of a pack
FREE, PACKING = {"padding_free": True, "max_length": None}, {"packing": True, "max_length": PACKED}
SIDES: dict[str, tuple[str, dict[str, Any]]] = {
    "padded": ("sdpa", {"max_length": PACKED}),
    "padding-free": ("sdpa", FREE),
    "distca, padding-free": ("distca", FREE),
    "packing": ("sdpa", PACKING),
    "distca, packing": ("distca", PACKING),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8, help="steps of each side, after warm-up")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (options.steps + WARM_UP, folder), nprocs=2)
        record = json.loads(Path(folder, "result.json").read_text())
    text = report(record)
    print(text)
    options.out.joinpath("trl_cpu.md").write_text(text)
    options.out.joinpath("trl_cpu.json").write_text(json.dumps(record, indent=1) + "\n")


def _rank(rank: int, steps: int, folder: str) -> None:
    from distca.integrations.transformers import register

    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    os.environ["ACCELERATE_USE_CPU"] = "true"  # it uses the process group that is made here
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    registered = register()
    draw = np.random.default_rng(0)  # in case the order matters
    turns = Turns([side for _ in range(steps + 1) for side in draw.permutation([*SIDES]).tolist()])
    with ThreadPoolExecutor(len(SIDES)) as pool:
        running = {
            side: pool.submit(guarded, trained, side, registered, turns, steps, folder)
            for side in SIDES
        }
    sides = {side: one.result() for side, one in running.items()}
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps(sides))
    dist.destroy_process_group()


def trained(side: str, registered: Any, turns: Turns, steps: int, folder: str) -> dict[str, Any]:
    """Returns seconds, tokens and losses of the steps of a trainer."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    turns.take(side)
    attention, options = SIDES[side]
    watch = watching(turns, side)
    arguments = SFTConfig(
        folder,
        max_steps=steps,
        per_device_train_batch_size=1 if "packing" in options else len(ROWS[0]),
        train_sampling_strategy="sequential",  # ranks get batches in turn
        shuffle_dataset=False,
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        **options,
    )
    draw = np.random.default_rng(0)
    rows = [
        draw.integers(3, MODEL["vocab_size"], length).tolist()
        for _ in range(steps)
        for lengths in ROWS
        for length in lengths
    ]
    trainer = SFTTrainer(
        model_with(attention),
        arguments,
        train_dataset=Dataset.from_dict({"input_ids": rows, "labels": rows}),
        processing_class=tokenizer(),
        callbacks=[watch],
    )
    if attention == "distca":
        registered.adopt(trainer)
    trainer.train()
    turns.give()
    logged = [one for one in trainer.state.log_history if "loss" in one]
    totals = [0, *(one["num_tokens"] for one in logged)]
    return {
        "step_s": watch.seconds[WARM_UP:],
        "tokens": np.diff(totals).tolist()[WARM_UP:],
        "losses": [one["loss"] for one in logged],
    }


def tokenizer() -> Any:
    """Returns one that only serves to have tokens for the end and for padding."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"w{number}": number for number in range(MODEL["vocab_size"])}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="w1", pad_token="w2")


def report(record: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "trl"))
    load = f"load average {os.getloadavg()[1]:.1f} at the end"
    lines = [
        "# TRL's SFTTrainer on two cores",
        "",
        f"`python benchmarks/trl_cpu.py`, {date.today()}, {os.cpu_count()} cores"
        f" ({load}), {platform.processor() or platform.machine()},",
        f"{versions}, gloo, 2 ranks with one thread each, DDP. Llama of width 256 with 4 layers"
        " and 8 heads of 64, float32.",
        f"Rows of each step: {ROWS[0]} on one rank, {ROWS[1]} on the other; with packing, TRL packs"
        f" them into {PACKED} tokens.",
        f"{len(record['padded']['step_s'])} steps of each side, in turns.",
        "",
        "| side | tokens/s | over padding-free (quartiles) | over packing (quartiles) |",
        "|---|---|---|---|",
    ]
    per_token = {
        side: (np.array(one["step_s"]) / np.array(one["tokens"])).tolist()
        for side, one in record.items()
    }
    for side, spent in per_token.items():
        lines.append(
            f"| {side} | {1 / median(spent):.0f} | {gain(per_token['padding-free'], spent)} |"
            f" {gain(per_token['packing'], spent)} |"
        )
    apart = max(
        abs(a - b) / abs(a)
        for mode in ("padding-free", "packing")
        for a, b in zip(record[mode]["losses"], record[f"distca, {mode}"]["losses"], strict=True)
    )
    lines += ["", f"Losses with and without distca are at most {apart:.1e} apart (relative).", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
