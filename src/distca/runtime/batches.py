"""A step as a rank runs it: the documents of a batch, and the plans that were made for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from distca.data.documents import IGNORE, Batch
from distca.pipeline.step_plan import Half, StepPlan
from distca.pipeline.step_planner import StepPlanner
from distca.planning.spans import Ints


class Rows(NamedTuple):
    """[T] each: one worker's packed tokens."""

    tokens: Tensor
    positions: Tensor  # in their documents
    labels: Tensor
    lengths: Tensor  # of their documents


@dataclass(frozen=True, eq=False)
class Step:
    """One optimizer step."""

    batch: Batch
    plan: StepPlan

    @classmethod
    def of(cls, planner: StepPlanner, batch: Batch, *, train: bool = True) -> Step:
        """``train``: forward and backward; else forward alone, for evaluation."""
        return cls(batch, planner.plan(batch.lengths, train=train))

    def rows(self, half: Half, worker: int) -> Rows:
        """What one worker of a stage holds, packed; fillers are zeros that nobody learns from."""
        placement = half.placement
        columns: list[list[Ints]] = [[], [], [], []]
        for shard in np.flatnonzero(placement.worker == worker).tolist():
            number = int(placement.document[shard])
            span = slice(int(placement.start[shard]), int(placement.stop[shard]))
            size = span.stop - span.start
            tokens, labels = np.zeros(size, np.int64), np.full(size, IGNORE)
            if number < len(half.members):
                document = self.batch.documents[int(half.members[number])]
                tokens, labels = document.tokens[span], document.labels[span]
            row = (
                tokens,
                np.arange(span.start, span.stop),
                labels,
                np.full(size, placement.lengths[number]),
            )
            for column, values in zip(columns, row, strict=True):
                column.append(values)
        empty = np.zeros(0, np.int64)
        return Rows(*(torch.from_numpy(np.concatenate([empty, *column])) for column in columns))
