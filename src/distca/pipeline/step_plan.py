"""The plan of one optimizer step: the placement of its micro-batches and the plans of each tick."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from distca.pipeline.schedule import FORWARD, Schedule
from distca.pipeline.stages import Layers, backward_layers, sends_gradient
from distca.planning.placement import Placement
from distca.planning.plan import Plan
from distca.planning.spans import Ints


@dataclass(frozen=True, eq=False)
class Half:
    """Documents that are placed and planned together.

    A micro-batch has one half, or two with ping-pong.

    members: the document numbers in the batch, [documents]. Document i of the placement is document
        members[i] of the batch; documents beyond them are fillers.
    placement: the placement on the workers of one pipeline stage, which is the same in each stage.
    given: the placement of the same documents before a placer moved them.
    """

    members: Ints
    placement: Placement
    given: Placement


Slot = tuple[Plan, ...]  # the plans of one attention slot, one for each half


@dataclass(frozen=True, eq=False)
class StepPlan:
    """The plans of all attention slots of one optimizer step."""

    schedule: Schedule
    micro_batches: tuple[tuple[Half, ...], ...]
    slots: tuple[tuple[Slot, ...], ...]  # of each tick, in order
    stages: tuple[Layers, ...]  # the layers of each pipeline stage
    first_trained_part: int  # the first part with a trained parameter (``pipeline.stages``)

    @cached_property
    def backward_slots(self) -> tuple[int, ...]:
        """The number of slots that each stage fills with its own layers in a backward tick."""
        return tuple(backward_layers(stage, self.first_trained_part) for stage in self.stages)

    def sends_gradient(self, stage: int) -> bool:
        """Returns whether a stage sends a gradient to the stage before it."""
        return sends_gradient(self.stages[stage], self.first_trained_part)

    @property
    def passes(self) -> Iterator[tuple[Plan, bool]]:
        """Yields every plan as often as it runs, and whether it runs backward."""
        for tick, slots in zip(self.schedule.ticks, self.slots, strict=True):
            for slot in slots:
                yield from ((plan, tick.phase != FORWARD) for plan in slot)

    @property
    def speed(self) -> list[float]:
        """[ranks] The relative speed of each rank; 0 if it computes no attention in any pass."""
        speeds = [plan.devices.speed for plan, _ in self.passes]
        return np.max(speeds, axis=0).tolist()  # type: ignore[no-any-return]

    def serves(self, rank: int) -> bool:
        """Returns whether a plan rank may compute attention in some pass."""
        return any(plan.devices.speed[rank] > 0 for plan, _ in self.passes)

    @property
    def num_bytes(self) -> int:
        """The bytes that all exchanges of the step send."""
        return sum(
            (plan.backward_traffic if backward else plan.traffic).total
            for plan, backward in self.passes
        )

    @property
    def imbalance(self) -> float:
        """Attention seconds of the slowest rank over the mean, each summed over all passes."""
        worst = mean = 0.0
        for plan, backward in self.passes:
            load = plan.backward_load_ps if backward else plan.forward_load_ps
            worst += float(plan.devices.finish_ps(load).max())
            mean += plan.devices.mean_ps(int(load.sum()))
        return worst / mean if mean else 1.0

    @property
    def imbalance_before(self) -> float:
        """The mean imbalance if every task ran at home, weighted by the load of each pass."""
        loads = [float(plan.forward_load_ps.sum()) for plan, _ in self.passes]
        before = [plan.imbalance_before for plan, _ in self.passes]
        return float(np.average(before, weights=loads)) if sum(loads) else 1.0

    @cached_property
    def fingerprint(self) -> str:
        """A digest that is equal on two ranks if and only if they have the same plans."""
        digest = hashlib.sha256(str(self.schedule).encode())
        for plan, _ in self.passes:
            digest.update(plan.fingerprint.encode())
        return digest.hexdigest()
