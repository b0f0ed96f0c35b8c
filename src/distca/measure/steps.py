"""Real training steps of several sides in turns, as the slowest rank takes them.

Every side has the same initial weights and trains the same batches. The order of sides rotates from
step to step, so that what else the machine does meets all of them alike.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from distca.measure.sides import Ready, Side
from distca.runtime.mesh import RankContext


@dataclass(frozen=True)
class StepFigures:
    """What a step has taken, over all ranks."""

    seconds: float  # of the slowest rank
    loss: float
    attention_worst: float  # seconds of the busiest rank
    attention_mean: float
    exposed: float  # seconds in which the rank that waits most for peers does so
    bytes: int  # sent by all ranks
    step_bytes: int  # memory beyond weights and optimizer states at the peak, of the fullest rank
    alloc_retries: int  # how often a rank was short of memory and emptied the allocator's cache


def in_turns(names: Iterable[str], number: int) -> list[str]:
    """Returns the names of sides in the order of a step."""
    names = [*names]
    turn = number % max(len(names), 1)
    return names[turn:] + names[:turn]


def train_step(side: Side, ready: Ready, context: RankContext) -> StepFigures:
    """Trains one step, for which all ranks start together."""
    gpu, before, retries = context.device.type == "cuda", 0, 0
    if gpu:
        torch.cuda.reset_peak_memory_stats()
        before, retries = torch.cuda.memory_allocated(), _alloc_retries()
    dist.barrier(context.world_group)
    start = time.perf_counter()
    loss = ready.run()
    side.update()
    if gpu:
        torch.cuda.synchronize()
    taken = time.perf_counter() - start
    spent = [meter.take() for meter in side.meters]
    attention, exposed = (
        sum(one.get(name, 0.0) for one in spent) for name in ("attention", "exposed")
    )
    peak = torch.cuda.max_memory_allocated() - before if gpu else 0
    retries = _alloc_retries() - retries if gpu else 0
    figures = [taken, float(loss), attention, exposed, peak, retries]
    mine = torch.tensor(figures, dtype=torch.float64)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine, group=context.world_group)
    seconds, losses, busy, exposures, peaks, retried = torch.stack(everyone).T
    plan = side.plan_of(ready)
    return StepFigures(
        seconds=float(seconds.max()),
        loss=float(losses.sum()),
        attention_worst=float(busy.max()),
        attention_mean=float(busy.mean()),
        exposed=float(exposures.max()),
        bytes=0 if plan is None else plan.num_bytes,
        step_bytes=int(peaks.max()),
        alloc_retries=int(retried.max()),
    )


def _alloc_retries() -> int:
    return int(torch.cuda.memory_stats().get("num_alloc_retries", 0))
