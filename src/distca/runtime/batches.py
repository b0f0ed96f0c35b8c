"""A step as a rank runs it: a batch of documents and the plans for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from distca.data.documents import IGNORE, Batch
from distca.pipeline.step_plan import Half, StepPlan
from distca.pipeline.step_planner import StepPlanner


class TokenRows(NamedTuple):
    """The packed tokens of one worker and half, [T] each."""

    tokens: Tensor
    positions: Tensor  # of each token in its document
    labels: Tensor
    lengths: Tensor  # of each token's document


@dataclass(frozen=True, eq=False)
class Step:
    """The batch and the plans of one optimizer step."""

    batch: Batch
    plan: StepPlan

    @classmethod
    def of(cls, planner: StepPlanner, batch: Batch, *, train: bool = True) -> Step:
        """Plans a batch, forward and backward or (``train=False``) forward only."""
        return cls(batch, planner.plan(batch.lengths, train=train))

    def rows(self, half: Half, worker: int) -> TokenRows:
        """Packs the tokens of one worker of a stage; fillers are zeros without labels."""
        placement = half.placement
        shards = [np.zeros((4, 0), np.int64)]
        for shard in np.flatnonzero(placement.worker == worker).tolist():
            number = int(placement.document[shard])
            span = slice(int(placement.start[shard]), int(placement.stop[shard]))
            size = span.stop - span.start
            tokens, labels = np.zeros(size, np.int64), np.full(size, IGNORE)
            if number < len(half.members):
                document = self.batch.documents[int(half.members[number])]
                tokens, labels = document.tokens[span], document.labels[span]
            positions = np.arange(span.start, span.stop)
            lengths = np.full(size, placement.lengths[number])
            shards.append(np.stack([tokens, positions, labels, lengths]))
        return TokenRows(*torch.from_numpy(np.concatenate(shards, axis=1)))
