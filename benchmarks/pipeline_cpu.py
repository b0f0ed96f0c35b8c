"""A pipeline with pooled attention compared with plain 1F1B: 2 stages on 2 cores.

    python benchmarks/pipeline_cpu.py            about seven minutes
    python benchmarks/pipeline_cpu.py --steps 2  quicker, noisier

One micro-batch is one long document, the others consist of short ones, with equal tokens in each.
*1F1B*: ``Schedule1F1B`` of torch.distributed.pipelining on the same model, with the same attention
kernels on whole documents. *per stage*: our ticks, where every stage computes its own attention.
*pooled*: our ticks, where the attention of every tick is planned over both ranks. Steps of the
three alternate in one run.

Predictions use the records of the per-stage variant, the linear and attention seconds of each
stage and micro-batch. 1F1B follows from its dependencies. Pooled is, for each tick, the linear
seconds of the slower stage plus the attention divided evenly, with no time for communication.

*Load*: attention seconds of each rank in each tick, worst / mean, over all ticks in sequence.
*Idle*: the share of a traced step in which a rank runs no operator.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.profiler import profile
from train_cpu import MODEL, batch_of, measured_cost

from distca.attention.backends.base import Saved
from distca.attention.backends.packed import PackedCall
from distca.attention.backends.sdpa import Sdpa
from distca.model.initialize import initialize
from distca.model.llama import Arriving, on_meta, plainly
from distca.pipeline.mesh import MeshShape
from distca.pipeline.schedule import FORWARD, Tick
from distca.pipeline.step_planner import StepPlanner
from distca.planning.masks import Mask
from distca.planning.options import PlanOptions
from distca.planning.policies import policy_of
from distca.runtime.batches import Step
from distca.runtime.mesh import RankContext, join_mesh
from distca.runtime.parallelize import Precision, parallelize
from distca.runtime.step import StepRunner

STAGES, LONG, SHORT, SHORTS = 2, 12288, 128, 2
MICRO_BATCHES = 1 + SHORTS
LENGTHS = [LONG, *[SHORT] * (SHORTS * LONG // SHORT)]
RESULTS = Path(__file__).parent / "results"
Records = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=4, help="of each side, after one to warm up")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (options.steps, folder), nprocs=STAGES)
        records = json.loads(Path(folder, "result.json").read_text())
    text = report(records)
    print(text)
    options.out.joinpath("pipeline_cpu.md").write_text(text)
    options.out.joinpath("pipeline_cpu.json").write_text(json.dumps(records, indent=1) + "\n")


def _rank(rank: int, steps: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=STAGES
    )
    context = join_mesh(MeshShape(pp=STAGES), torch.device("cpu"))
    cost = measured_cost(context)
    batch = batch_of(LENGTHS)
    masks = tuple(MODEL.mask_of(layer) for layer in range(MODEL.layers))
    ours_of = {
        side: Step.of(
            StepPlanner(
                context.parallel,
                masks,
                PlanOptions(model=MODEL.shape, cost=cost),
                policy_of(policy),
                micro_batches=MICRO_BATCHES,
            ),
            batch,
        )
        for side, policy in (("per stage", "colocated"), ("pooled", "distca"))
    }
    ours = {side: Ours(context, step) for side, step in ours_of.items()}
    sides: dict[str, Callable[[], float]] = {"1F1B": plain_1f1b(context, ours_of["pooled"]), **ours}
    walls: dict[str, list[float]] = {side: [] for side in sides}
    losses: dict[str, float] = {}
    turns = np.random.default_rng(0)
    for number in range(steps + 1):
        for side in turns.permutation(list(sides)).tolist():
            wall, losses[side] = timed(sides[side], context)
            if number:
                walls[side].append(wall)
    idle = {side: traced_idle(run, context) for side, run in sides.items()}
    ticks = {side: run.by_tick(context) for side, run in ours.items()}
    if rank == 0:
        result = summary(walls, ticks, ours_of) | {"losses": losses, "idle": idle}
        Path(folder, "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def timed(run: Callable[[], float], context: RankContext) -> tuple[float, float]:
    dist.barrier(group=context.world_group)
    start = time.perf_counter()
    loss = torch.tensor(run())
    dist.barrier(group=context.world_group)
    wall = time.perf_counter() - start
    dist.all_reduce(loss, group=context.world_group)
    return wall, float(loss)


def gathered(mine: Any, context: RankContext) -> list[Any]:
    found: list[Any] = [None] * STAGES
    dist.all_gather_object(found, mine, group=context.world_group)
    return found


# -- our ticks ---------------------------------------------------------------------------------


class Ours:
    """A step, with what this rank did in each tick: all its own seconds, and those of attention."""

    def __init__(self, context: RankContext, step: Step) -> None:
        self.step, self.records = step, [[] for _ in step.plan.schedule.ticks]
        self.attention = StepRunner.of(context).attentions
        self.runner = StepRunner(context, self.attention, observe=self._observe)
        start, stop = step.plan.stages[context.stage]
        self.model = on_meta(MODEL, start, stop)
        parallelize(self.model, context, Precision())
        initialize(self.model, seed=0)

    def __call__(self) -> float:
        self._since = time.thread_time()
        loss = float(self.runner.train(self.model, self.step))
        self.model.zero_grad()
        return loss

    def _observe(self, number: int, _: Tick) -> None:
        spent = self.attention[0].meter.take()
        now = time.thread_time()
        self.records[number].append((now - self._since, spent.get("attention", 0.0)))
        self._since = now

    def by_tick(self, context: RankContext) -> list[list[list[float]]]:
        """[ticks][ranks] median (own, attention) seconds."""
        mine = [
            [median(values) for values in zip(*record[1:], strict=True)] for record in self.records
        ]
        return [list(ranks) for ranks in zip(*gathered(mine, context), strict=True)]


# -- plain 1F1B --------------------------------------------------------------------------------


class Attend(torch.autograd.Function):
    """Whole documents where they are, with the kernels of the other sides."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: PackedCall) -> Tensor:
        attended = Sdpa().forward(q, k, v, call, MODEL.head_dim**-0.5)
        ctx.save_for_backward(q, k, v, *attended)
        ctx.call = call
        return attended.out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved, scale = Saved(*ctx.saved_tensors), MODEL.head_dim**-0.5
        return *Sdpa().backward(grad, saved, ctx.call, scale), None


class PlainStage(nn.Module):
    def __init__(self, start: int, stop: int) -> None:
        super().__init__()
        self.model = on_meta(MODEL, start, stop)
        initialize(self.model, seed=0)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        starts = torch.nonzero(positions == 0).flatten().numpy()
        offsets = np.append(starts, len(positions))
        call = PackedCall.of(Mask.parse("causal"), offsets, offsets, "cpu")

        def attend(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return Attend.apply(q, k, v, call)

        (leaving,) = self.model([Arriving(x, positions)], plainly(attend))
        return leaving.x


def plain_1f1b(context: RankContext, ours: Step) -> Callable[[], float]:
    """The same micro-batches in the same order."""
    rows = [ours.rows(halves[0], 0) for halves in ours.plan.micro_batches]
    tokens, positions, labels = (
        torch.cat([getattr(r, name) for r in rows]) for name in rows[0]._fields[:3]
    )
    stage = PipelineStage(
        PlainStage(*ours.plan.stages[context.stage]),
        context.stage,
        STAGES,
        context.device,
        group=context.pipeline_group,
    )

    targets = ours.batch.num_targets

    def loss_of(logits: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits, target, reduction="sum") / targets

    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_of, scale_grads=False)

    def step() -> float:
        losses: list[Tensor] = []
        if context.stage == 0:
            schedule.step(tokens, positions=positions, return_outputs=False)
        else:
            schedule.step(target=labels, losses=losses, positions=positions, return_outputs=False)
        stage.submod.zero_grad()
        return float(sum(loss.item() for loss in losses))

    return step


# -- what they show ----------------------------------------------------------------------------


def traced_idle(run: Callable[[], float], context: RankContext) -> list[float]:
    """Of one traced step on each rank: the share in which no operator ran."""
    dist.barrier(group=context.world_group)
    with profile() as profiler:
        start = time.perf_counter()
        run()
        dist.barrier(group=context.world_group)
        wall = time.perf_counter() - start
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    spans = sorted(
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") == "cpu_op" and event["name"].startswith(("aten::", "distca::"))
    )
    busy, end = 0.0, 0.0
    for first, last in spans:
        busy += max(last - max(first, end), 0.0)
        end = max(end, last)
    return gathered(1 - busy / 1e6 / wall, context)


def summary(
    walls: dict[str, list[float]],
    ticks: dict[str, list[list[list[float]]]],
    steps: dict[str, Step],
) -> Records:
    schedule = steps["pooled"].plan.schedule
    cells: dict[tuple[int, str, int], tuple[float, float]] = {}  # linear and attention seconds
    for tick, ranks in zip(schedule.ticks, ticks["per stage"], strict=True):
        for stage, (own, attention) in enumerate(ranks):
            if (number := tick.micro_batches[stage]) is not None:
                cells[stage, tick.phase, number] = (own - attention, attention)
    pooled = sum(
        max((cells[s, t.phase, m][0] for s, m in enumerate(t.micro_batches) if m is not None))
        + sum(cells[s, t.phase, m][1] for s, m in enumerate(t.micro_batches) if m is not None)
        / STAGES
        for t in schedule.ticks
    )
    plain = predicted_1f1b({cell: sum(seconds) for cell, seconds in cells.items()})
    tokens = steps["pooled"].batch.num_tokens
    return {
        "tokens_per_s": {side: tokens / median(taken) for side, taken in walls.items()},
        "over_1f1b": {
            side: median(a / b for a, b in zip(walls["1F1B"], taken, strict=True))
            for side, taken in walls.items()
        },
        "predicted": plain / pooled,
        "predicted_s": {"1F1B": plain, "pooled": pooled},
        "load": {side: load(found) for side, found in ticks.items()},
        "planned": {side: step.plan.imbalance for side, step in steps.items()},
        "attention_s": {
            side: [[attention for _, attention in ranks] for ranks in found]
            for side, found in ticks.items()
        },
        "grid": str(schedule),
    }


def load(ticks: list[list[list[float]]]) -> float:
    attention = np.array(ticks)[:, :, 1]
    return float(attention.max(axis=1).sum() / attention.mean(axis=1).sum())


def predicted_1f1b(cells: dict[tuple[int, str, int], float]) -> float:
    """When the last backward ends: each stage takes its passes in order, as soon as it may."""
    orders = []
    for stage in range(STAGES):
        ahead = min(MICRO_BATCHES, STAGES - stage)
        order = [(FORWARD, m) for m in range(ahead)]
        for m in range(MICRO_BATCHES):
            order.append(("B", m))
            if m + ahead < MICRO_BATCHES:
                order.append((FORWARD, m + ahead))
        orders.append(order)
    done: dict[tuple[int, str, int], float] = {}
    free = [0.0] * STAGES
    while any(orders):
        for stage, order in enumerate(orders):
            while order:
                phase, m = order[0]
                needs = [(stage - 1, FORWARD, m)] if phase == FORWARD else [(stage + 1, "B", m)]
                needs = [need for need in needs if 0 <= need[0] < STAGES]
                if not all(need in done for need in needs):
                    break
                begin = max([free[stage], *(done[need] for need in needs)])
                free[stage] = done[stage, phase, m] = begin + cells[stage, phase, m]
                order.pop(0)
    return max(done.values())


def report(records: Records) -> str:
    lines = [
        "# A pipeline on two cores",
        "",
        f"`python benchmarks/pipeline_cpu.py`, {date.today()}, {os.cpu_count()} cores,"
        f" {platform.processor() or platform.machine()}, torch {torch.__version__}, gloo, 2 stages",
        "with one thread each. The debug model (width 256, 4 layers) with 8 heads of 64, float32."
        f" {MICRO_BATCHES} micro-batches of",
        f"{LONG} tokens: one document of {LONG}, and {SHORTS} times {LONG // SHORT} of {SHORT}.",
        "",
        "| side | tokens/s | over 1F1B | predicted | attention per tick, worst / mean (planned) |"
        " idle (rank 0, 1) |",
        "|---|---|---|---|---|---|",
    ]
    for side, speed in records["tokens_per_s"].items():
        predicted = f"{records['predicted']:.3f}" if side == "pooled" else "-"
        loads = "-"
        if side in records["load"]:
            loads = f"{records['load'][side]:.3f} ({records['planned'][side]:.3f})"
        idle = ", ".join(f"{share:.0%}" for share in records["idle"][side])
        gain = records["over_1f1b"][side]
        lines.append(f"| {side} | {speed:.0f} | {gain:.3f} | {predicted} | {loads} | {idle} |")
    lines += ["", f"Losses: {json.dumps(records['losses'])}", "", "```", records["grid"], "```", ""]
    lines += ["Attention seconds of each tick on each rank:", ""]
    lines += ["| tick | per stage | pooled |", "|---|---|---|"]
    for number, (apart, together) in enumerate(
        zip(*(records["attention_s"][side] for side in ("per stage", "pooled")), strict=True)
    ):
        both = (", ".join(f"{seconds:.3f}" for seconds in ranks) for ranks in (apart, together))
        lines.append(f"| {number} | {' | '.join(both)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
