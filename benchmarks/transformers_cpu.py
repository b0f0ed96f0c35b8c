"""transformers' Trainer with sdpa and with distca: 2 ranks on 2 cores, one thread each.

    python benchmarks/transformers_cpu.py            about four minutes
    python benchmarks/transformers_cpu.py --steps 4  quicker, noisier

All sides use the same small Llama, documents and Trainer, and alternate step by step in one run, so
that other load on the machine affects all of them. Lengths are fixed below: one rank has one long
document and the other has short ones, with equally many tokens.

- *sdpa*: transformers' own attention, which computes the scores between documents and masks them.
- *colocated*: distca's kernels on whole documents, with nothing moved (``policy="colocated"``). The
  gain over sdpa comes from computing each document separately.
- *distca*: attention planned over both ranks. The gain over colocated comes from balance.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

LENGTHS = ([4096], [64] * 64)  # of each rank, in every step
MODEL = {
    "vocab_size": 259,
    "hidden_size": 256,
    "intermediate_size": 320,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,  # attention then has about the same share as in Llama-3-8B at 128K
    "max_position_embeddings": 4096,
}
SIDES = ("sdpa", "colocated", "distca")
WARM_UP = 2  # steps of each side that are not measured
RESULTS = Path(__file__).parent / "results"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--steps", type=int, default=12, help="steps of each side, after two for warm-up"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (options.steps + WARM_UP, folder), nprocs=2)
        record = json.loads(Path(folder, "result.json").read_text())
    text = report(record)
    print(text)
    options.out.joinpath("transformers_cpu.md").write_text(text)
    options.out.joinpath("transformers_cpu.json").write_text(json.dumps(record, indent=1) + "\n")


class Turns:
    """Lets one of several threads run at a time, in the same order on both ranks."""

    def __init__(self, order: Sequence[str]) -> None:
        self._order, self._changed = list(order), threading.Condition()

    def take(self, side: str) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._order[0] == side)

    def give(self) -> None:
        with self._changed:
            self._order.pop(0)
            self._changed.notify_all()


def _rank(rank: int, steps: int, folder: str) -> None:
    from distca.integrations.transformers import register

    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    os.environ["ACCELERATE_USE_CPU"] = "true"  # it uses the process group that is made here
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    registered = {
        "colocated": register("colocated", policy="colocated"),
        "distca": register("distca"),
    }
    draw = np.random.default_rng(0)  # in case the order matters
    turns = Turns([side for _ in range(steps + 1) for side in draw.permutation(SIDES).tolist()])
    with ThreadPoolExecutor(len(SIDES)) as pool:
        running = {
            side: pool.submit(guarded, trained, side, registered.get(side), turns, steps, folder)
            for side in SIDES
        }
    sides = {side: one.result() for side, one in running.items()}
    for side, one in registered.items():
        spent = one.attention.take_seconds()["attention"] / steps
        both = [torch.zeros(()) for _ in range(2)]
        dist.all_gather(both, torch.tensor(spent))
        sides[side]["attention_s"] = [value.item() for value in both]
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps(sides))
    dist.destroy_process_group()


def guarded(work: Any, *args: Any) -> Any:
    """Ends the process if one thread fails, since the others would wait for its turn."""
    try:
        return work(*args)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def model_with(attention: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**MODEL, attn_implementation=attention))


def trained(side: str, registered: Any, turns: Turns, steps: int, folder: str) -> dict[str, Any]:
    """Returns seconds and losses of the steps of a Trainer."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class TakingTurns(TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.began, self.seconds = 0.0, list[float]()

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            turns.give()
            turns.take(side)
            dist.barrier()
            self.began = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            dist.barrier()
            self.seconds.append(time.perf_counter() - self.began)

    turns.take(side)
    watch = TakingTurns()
    arguments = TrainingArguments(
        folder,
        max_steps=steps,
        per_device_train_batch_size=1,
        train_sampling_strategy="sequential",  # ranks get batches in turn
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        ddp_find_unused_parameters=False,
    )
    dataset = [packed(lengths) for _ in range(steps) for lengths in LENGTHS]
    trainer = Trainer(model_with(side), arguments, train_dataset=dataset, callbacks=[watch])
    if registered is not None:
        registered.adopt(trainer)
    trainer.train()
    turns.give()
    losses = [one["loss"] for one in trainer.state.log_history if "loss" in one]
    return {"step_s": watch.seconds[WARM_UP:], "losses": losses}


def packed(lengths: list[int]) -> dict[str, list[int]]:
    """Returns random documents in one row, with position_ids that restart."""
    tokens = np.random.default_rng(sum(lengths[:1])).integers(0, MODEL["vocab_size"], sum(lengths))
    positions = np.concatenate([np.arange(length) for length in lengths])
    labels = np.where(positions == 0, -100, tokens)
    return {
        "input_ids": tokens.tolist(),
        "position_ids": positions.tolist(),
        "labels": labels.tolist(),
    }


def report(record: dict[str, Any]) -> str:
    step_s = {side: record[side]["step_s"] for side in SIDES}
    losses = {side: record[side]["losses"] for side in SIDES}
    tokens = sum(map(sum, LENGTHS))
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    lines = [
        "# transformers' Trainer on two cores",
        "",
        f"`python benchmarks/transformers_cpu.py`, {date.today()}, {os.cpu_count()} cores,"
        f" {platform.processor() or platform.machine()}, {versions}, gloo, 2 ranks",
        "with one thread each, DDP. Llama of width 256 with 4 layers and 8 heads of 64, float32."
        " One rank has a",
        f"document of 4,096 tokens, the other 64 of 64; {len(step_s['sdpa'])} steps of each side,"
        " in turns.",
        "",
        "| side | tokens/s | over sdpa (quartiles) | over colocated (quartiles) |"
        " attention s (rank 0, 1) |",
        "|---|---|---|---|---|",
    ]
    for side in SIDES:
        spent = ", ".join(f"{value:.2f}" for value in record[side].get("attention_s", []))
        lines.append(
            f"| {side} | {tokens / median(step_s[side]):.0f} |"
            f" {gain(step_s['sdpa'], step_s[side])} | {gain(step_s['colocated'], step_s[side])} |"
            f" {spent or 'not told'} |"
        )
    apart = max(
        abs(a - b) / abs(a)
        for side in SIDES[1:]
        for a, b in zip(losses["sdpa"], losses[side], strict=True)
    )
    first, *_, last = losses["sdpa"]
    lines += [
        "",
        f"Losses of {len(losses['sdpa'])} steps, from {first:.4f} to {last:.4f}, are at most"
        f" {apart:.1e} apart (relative).",
        "",
    ]
    return "\n".join(lines)


def gain(base: list[float], ours: list[float]) -> str:
    """Returns quartiles of the ratio step by step, since the speed of the machine varies."""
    low, middle, high = np.percentile(np.array(base) / np.array(ours), [25, 50, 75])
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


if __name__ == "__main__":
    main()
