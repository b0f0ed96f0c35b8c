"""What one optimizer step runs: its micro-batches as they are placed, the plans of each tick."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from distca.pipeline.schedule import FORWARD, Schedule
from distca.pipeline.stages import Layers, backward_layers, gradient_enters
from distca.planning.placement import Placement
from distca.planning.plan import Plan
from distca.planning.spans import Ints


@dataclass(frozen=True, eq=False)
class Half:
    """Documents that are placed and planned together; a micro-batch has one, or ping and pong."""

    members: Ints  # positions in the batch; fillers, which no batch has, are numbered after them
    placement: Placement  # on the workers of one pipeline stage, the same in each
    given: Placement  # the same documents before a placer moved them


Slot = tuple[Plan, ...]  # one attention of all stages at once, for each half


@dataclass(frozen=True, eq=False)
class StepPlan:
    """One optimizer step: micro-batches of one or two halves, through all stages, tick by tick."""

    schedule: Schedule
    micro_batches: tuple[tuple[Half, ...], ...]
    slots: tuple[tuple[Slot, ...], ...]  # of each tick, in order
    stages: tuple[Layers, ...]
    first_trained_part: int  # of the model that learns

    @cached_property
    def backward_slots(self) -> tuple[int, ...]:
        """Slots of a backward tick that each stage takes for layers of its own."""
        return tuple(backward_layers(stage, self.first_trained_part) for stage in self.stages)

    def gradient_enters(self, stage: int) -> bool:
        """Whether a stage sends a gradient to the one before it."""
        return gradient_enters(self.stages[stage], self.first_trained_part)

    @property
    def passes(self) -> Iterator[tuple[Plan, bool]]:
        """Every plan as often as it runs, and whether backward."""
        for tick, slots in zip(self.schedule.ticks, self.slots, strict=True):
            for slot in slots:
                yield from ((plan, tick.phase != FORWARD) for plan in slot)

    @property
    def num_bytes(self) -> int:
        return sum(
            (plan.backward_traffic if backward else plan.traffic).total
            for plan, backward in self.passes
        )

    @property
    def imbalance(self) -> float:
        """Attention's worst rank over the mean, all passes one after the other."""
        worst = mean = 0.0
        for plan, backward in self.passes:
            work = plan.backward_work_ps if backward else plan.forward_work_ps
            worst += float(plan.devices.seconds_ps(work).max())
            mean += plan.devices.mean_ps(int(work.sum()))
        return worst / mean if mean else 1.0

    @property
    def imbalance_before(self) -> float:
        """The same with every task at home."""
        work = [float(plan.forward_work_ps.sum()) for plan, _ in self.passes]
        before = [plan.imbalance_before for plan, _ in self.passes]
        return float(np.average(before, weights=work)) if sum(work) else 1.0

    @cached_property
    def fingerprint(self) -> str:
        """Equal on two ranks exactly when they hold the same plans."""
        digest = hashlib.sha256(str(self.schedule).encode())
        for plan, _ in self.passes:
            digest.update(plan.fingerprint.encode())
        return digest.hexdigest()
