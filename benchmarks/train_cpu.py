"""Disaggregated training compared with colocated training: 2 ranks on 2 cores, one thread each.

    python benchmarks/train_cpu.py            about four minutes
    python benchmarks/train_cpu.py --steps 4  quicker, noisier

All variants have the same documents, model and ranks; their steps alternate in one run, so that
other load on the machine affects all of them. Lengths are fixed below. *Uneven*: one rank has one
long document, the other has short ones. *Even*: all documents have the same length, so there is
nothing to gain and should be nothing to lose.

Plans use a cost model fitted to kernel calls that are timed at the start, on both ranks at once.

The prediction is what perfect balance and instant communication would give: the linear seconds of
the step plus the attention seconds of the slowest rank, divided by the same with the mean of the
ranks' attention seconds, all measured on the colocated variant.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from dataclasses import replace
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from calibration import TimedCall, calibrated

from distca.attention.backends.base import Saved
from distca.attention.backends.packed import PackedCall
from distca.attention.backends.sdpa import Sdpa
from distca.data.documents import Batch, Document
from distca.model.initialize import initialize
from distca.model.llama import Llama, on_meta
from distca.model.sizes import model_config
from distca.pipeline.mesh import MeshShape
from distca.pipeline.step_planner import StepPlanner
from distca.planning.costs.base import CostModel
from distca.planning.masks import Mask
from distca.planning.options import PlanOptions
from distca.planning.policies import policy_of
from distca.planning.spans import Ints
from distca.runtime.batches import Step
from distca.runtime.mesh import RankContext, join_mesh
from distca.runtime.parallelize import Precision, parallelize
from distca.runtime.step import StepRunner

# With heads of 64 attention has about the share that it has in Llama-3-8B at a context of 128K.
MODEL = replace(model_config("debug"), head_dim=64)
LENGTHS = {
    "uneven": [4096, *[64] * 64],  # the long one on one rank, the short ones on the other
    "even": [1024] * 8,
}
SIDES = {
    "colocated": policy_of("colocated"),
    "given": policy_of("distca"),
    "balanced": policy_of("distca", "balanced"),
}
RESULTS = Path(__file__).parent / "results"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12, help="of each side, after two to warm up")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    records = {name: measure(name, options.steps) for name in LENGTHS}
    text = report(records)
    print(text)
    options.out.joinpath("train_cpu.md").write_text(text)
    options.out.joinpath("train_cpu.json").write_text(json.dumps(records, indent=1) + "\n")


def measure(name: str, steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (name, steps, folder), nprocs=2)
        return json.loads(Path(folder, "result.json").read_text())  # type: ignore[no-any-return]


def _rank(rank: int, name: str, steps: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    parallel = MeshShape(dp=2)
    context = join_mesh(parallel, torch.device("cpu"))
    model = on_meta(MODEL)
    parallelize(model, context, Precision())
    initialize(model, seed=0)
    runner = StepRunner.of(context)
    batch = batch_of(LENGTHS[name])
    masks = tuple(MODEL.mask_of(layer) for layer in range(MODEL.layers))
    cost = measured_cost(context)
    sides = {
        side: Step.of(
            StepPlanner(parallel, masks, PlanOptions(model=MODEL.shape, cost=cost), policy), batch
        )
        for side, policy in SIDES.items()
    }
    times: dict[str, list[list[float]]] = {
        side: [] for side in sides
    }  # seconds, attention, exposed
    losses: dict[str, float] = {}
    turns = np.random.default_rng(0)  # the order of the sides may matter
    for number in range(steps + 2):
        for side in turns.permutation(list(sides)).tolist():
            taken, losses[side] = stepped(model, runner, sides[side], context)
            if number >= 2:
                times[side].append(taken)
    if rank == 0:
        result = summary(times, sides) | {"losses": losses}
        Path(folder, "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def measured_cost(context: RankContext) -> CostModel:
    """Fitted to whole documents and to ends of long ones, as plans cut them; one for all ranks."""
    shapes = [(n, n) for n in (64, 256, 1024, 4096)]
    shapes += [(n, m) for m in (2048, 4096) for n in (128, 512, 1024)]
    dist.barrier(group=context.world_group)
    times = torch.tensor([timed(queries, keys) for queries, keys in shapes])
    dist.all_reduce(times, group=context.world_group)
    calls = [
        TimedCall(*count(queries, keys), *taken)
        for (queries, keys), taken in zip(shapes, (times / 2).tolist(), strict=True)
    ]
    return calibrated(MODEL.shape, calls, "measured", tile=1)


def count(queries: int, keys: int) -> tuple[Ints, Ints, Ints]:
    """Queries, keys and pairs of a call: as many tasks of one shape as make 4,096 rows."""
    tasks = np.ones(4096 // keys, np.int64)
    return tasks * queries, tasks * keys, tasks * (queries * keys - queries * (queries - 1) // 2)


def timed(queries: int, keys: int) -> tuple[float, float]:
    """Median seconds forward and backward."""
    num_queries, num_keys, _ = count(queries, keys)
    offsets = [np.concatenate([[0], np.cumsum(sizes)]) for sizes in (num_queries, num_keys)]
    call = PackedCall.of(Mask.parse("causal"), *offsets, "cpu")
    q, grad = torch.randn(2, call.num_queries, MODEL.heads, MODEL.head_dim)
    k, v = torch.randn(2, call.num_keys, MODEL.kv_heads, MODEL.head_dim)
    scale, backend = MODEL.head_dim**-0.5, Sdpa()
    times = []
    for _ in range(6):
        start = time.perf_counter()
        attended = backend.forward(q, k, v, call, scale)
        middle = time.perf_counter()
        backend.backward(grad, Saved(q, k, v, *attended), call, scale)
        times.append((middle - start, time.perf_counter() - middle))
    forward, backward = zip(*times[1:], strict=True)
    return median(forward), median(backward)


def batch_of(lengths: list[int]) -> Batch:
    rng = np.random.default_rng(0)
    return Batch(tuple(Document.from_tokens(rng.integers(0, 259, n)) for n in lengths))


def stepped(
    model: Llama, runner: StepRunner, step: Step, context: RankContext
) -> tuple[list[float], float]:
    """Wall seconds; attention and exposed seconds of both ranks; and the loss."""
    dist.barrier(group=context.world_group)
    start = time.perf_counter()
    loss = runner.train(model, step)
    model.zero_grad()
    dist.barrier(group=context.world_group)
    wall = time.perf_counter() - start
    spent = runner.attentions[0].meter.take()
    mine = torch.tensor([spent.get("attention", 0.0), spent.get("exposed", 0.0), loss.item()])
    both = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(both, mine, group=context.world_group)
    attention, exposed, losses = torch.stack(both).T
    return [wall, *attention.tolist(), *exposed.tolist()], float(losses.sum())


def summary(times: dict[str, list[list[float]]], sides: dict[str, Step]) -> dict[str, Any]:
    wall = {side: median(row[0] for row in rows) for side, rows in times.items()}
    attention = {
        side: [median(row[1 + rank] for row in rows) for rank in (0, 1)]
        for side, rows in times.items()
    }
    worst, mean = max(attention["colocated"]), sum(attention["colocated"]) / 2
    linear = wall["colocated"] - worst
    tokens = sides["colocated"].batch.num_tokens
    return {
        "tokens_per_s": {side: tokens / seconds for side, seconds in wall.items()},
        # Round by round, since the speed of the machine varies over time.
        "speed_up": {
            side: median(a[0] / b[0] for a, b in zip(times["colocated"], rows, strict=True))
            for side, rows in times.items()
        },
        "predicted": (linear + worst) / (linear + mean),
        "attention_s": attention,
        "exposed_s": {
            side: [median(row[3 + rank] for row in rows) for rank in (0, 1)]
            for side, rows in times.items()
        },
        "imbalance_before": sides["colocated"].plan.imbalance_before,
    }


def report(records: dict[str, Any]) -> str:
    lines = [
        "# Training on two cores",
        "",
        f"`python benchmarks/train_cpu.py`, {date.today()}, {os.cpu_count()} cores,"
        f" {platform.processor() or platform.machine()}, torch {torch.__version__}, gloo, 2 ranks",
        "with one thread each. The debug model (width 256, 4 layers) with 8 heads of 64, float32.",
        "",
        "| documents | side | tokens/s | over colocated | predicted | of predicted |"
        " attention s (rank 0, 1) | exposed s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, record in records.items():
        for side in SIDES:
            gain = record["speed_up"][side]
            lines.append(
                f"| {name} | {side} | {record['tokens_per_s'][side]:.0f} | {gain:.3f} |"
                f" {record['predicted']:.3f} | {gain / record['predicted']:.3f} |"
                f" {_both(record['attention_s'][side])} | {_both(record['exposed_s'][side])} |"
            )
    losses = {name: record["losses"] for name, record in records.items()}
    lines += ["", f"Losses: {json.dumps(losses)}", ""]
    return "\n".join(lines)


def _both(values: list[float]) -> str:
    return ", ".join(f"{value:.3f}" for value in values)


if __name__ == "__main__":
    main()
