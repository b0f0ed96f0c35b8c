"""A global batch -> micro-batches -> halves, placed and planned, and one worker's rows of them.

Everything here follows from the batch alone, so every rank makes the same plans by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from distca.data.documents import IGNORE, Batch, Document
from distca.planning.api import plan as make_plan
from distca.planning.masks import Mask
from distca.planning.models import ModelShape
from distca.planning.packing import by_group, filled, split
from distca.planning.placement import Placement
from distca.planning.plan import Plan
from distca.planning.spans import Ints
from distca.runtime.mesh import Parallel


@dataclass(frozen=True, eq=False)
class Half:
    """Documents that are placed and planned together; a micro-batch has one, or ping and pong."""

    documents: tuple[Document, ...]
    plans: tuple[Plan, ...]  # by layer; layers of one mask share one, and all one placement

    @property
    def placement(self) -> Placement:
        return self.plans[0].placement

    def rows(self, worker: int) -> Rows:
        """What one worker holds, packed; fillers are zeros that nobody learns from."""
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


@dataclass(frozen=True, eq=False)
class StepPlan:
    """One optimizer step: micro-batches of one or two halves."""

    micro_batches: tuple[tuple[Half, ...], ...]
    num_targets: int  # of the global batch: the loss is a mean over these
    num_tokens: int


@dataclass(frozen=True)
class Recipe:
    """How batches are split, placed and planned."""

    parallel: Parallel
    shape: ModelShape  # the whole model's heads
    masks: tuple[Mask, ...]  # by layer
    micro_batches: int = 1
    ping_pong: bool = False
    placement: str = "given"
    policy: str = "distca"
    options: Mapping[str, Any] = field(default_factory=dict)  # others of ``distca.plan``

    def plan(self, batch: Batch) -> StepPlan:
        halves_of = 2 if self.ping_pong else 1
        lengths = batch.lengths
        sets = split(lengths, self.micro_batches)
        micro_batches = tuple(
            tuple(
                self._half([batch.documents[i] for i in chosen[half].tolist()])
                for half in split(lengths[chosen], halves_of)
            )
            for chosen in sets
        )
        return StepPlan(micro_batches, batch.num_targets, batch.num_tokens)

    def _half(self, documents: Sequence[Document]) -> Half:
        lengths = np.array([len(document) for document in documents], dtype=np.int64)
        widest, *others = sorted(set(self.masks), key=lambda mask: mask.reach, reverse=True)
        main = self._plan(self._given(lengths), widest, self.placement)
        even = filled(main.placement, self.parallel.tp)
        if even is not main.placement:  # a placement of ours may leave odd counts
            main = self._plan(even, widest, "given")
        plans = {widest: main} | {mask: self._plan(even, mask, "given") for mask in others}
        return Half(tuple(documents), tuple(plans[mask] for mask in self.masks))

    def _given(self, lengths: Ints) -> Placement:
        return by_group(lengths, self.parallel.dp, self.parallel.cp, multiple=self.parallel.tp)

    def _plan(self, tokens: Placement, mask: Mask, placement: str) -> Plan:
        tp = self.parallel.tp
        shape = ModelShape(
            self.shape.name,
            heads=self.shape.heads // tp,
            kv_heads=self.shape.kv_heads // tp,
            head_dim=self.shape.head_dim,
        )
        return make_plan(
            tokens,
            model=shape,
            mask=mask,
            placement=placement,
            policy=self.policy,
            servers=self.parallel.servers // tp,
            **self.options,
        )
