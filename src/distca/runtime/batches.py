"""What a step runs on: halves of micro-batches, a worker's rows of them, the plans of each tick."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from distca.data.documents import IGNORE, Document
from distca.planning.placement import Placement
from distca.planning.plan import Plan
from distca.planning.schedule import FORWARD, Schedule
from distca.planning.spans import Ints
from distca.planning.stages import Layers, gradient_enters, learning_layers


@dataclass(frozen=True, eq=False)
class Half:
    """Documents that are placed and planned together; a micro-batch has one, or ping and pong."""

    documents: tuple[Document, ...]
    placement: Placement  # on the workers of one pipeline stage, the same in each

    def rows(self, worker: int) -> Rows:
        """What one worker of a stage holds, packed; fillers are zeros that nobody learns from."""
        placement = self.placement
        columns: list[list[Ints]] = [[], [], [], []]
        for shard in np.flatnonzero(placement.worker == worker).tolist():
            number = int(placement.document[shard])
            span = slice(int(placement.start[shard]), int(placement.stop[shard]))
            size = span.stop - span.start
            known = number < len(self.documents)
            row = (
                self.documents[number].tokens[span] if known else np.zeros(size, np.int64),
                np.arange(span.start, span.stop),
                self.documents[number].labels[span] if known else np.full(size, IGNORE),
                np.full(size, placement.lengths[number]),
            )
            for column, values in zip(columns, row, strict=True):
                column.append(values)
        empty = np.zeros(0, np.int64)
        return Rows(*(torch.from_numpy(np.concatenate([empty, *column])) for column in columns))


class Rows(NamedTuple):
    """[T] each: one worker's packed tokens."""

    tokens: Tensor
    positions: Tensor  # in their documents
    labels: Tensor
    lengths: Tensor  # of their documents


Slot = tuple[Plan, ...]  # one attention of all stages at once, for each half


@dataclass(frozen=True, eq=False)
class StepPlan:
    """One optimizer step: micro-batches of one or two halves, through all stages, tick by tick."""

    schedule: Schedule
    micro_batches: tuple[tuple[Half, ...], ...]
    slots: tuple[tuple[Slot, ...], ...]  # of each tick, in order
    stages: tuple[Layers, ...]
    first_part: int  # of the model that learns
    num_targets: int  # of the global batch: the loss is a mean over these
    num_tokens: int

    @cached_property
    def going_back(self) -> tuple[int, ...]:
        """Slots of a backward tick that each stage takes for layers of its own."""
        return tuple(learning_layers(stage, self.first_part) for stage in self.stages)

    def gradient_enters(self, stage: int) -> bool:
        """Whether a stage sends a gradient to the one before it."""
        return gradient_enters(self.stages[stage], self.first_part)

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
            worst += float(plan.servers.seconds_ps(work).max())
            mean += plan.servers.mean_ps(int(work.sum()))
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
