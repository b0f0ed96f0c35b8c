"""What every policy is given, and what it answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from distca.planning import masks
from distca.planning.costs.base import CostModel
from distca.planning.devices import Devices
from distca.planning.models import ModelShape
from distca.planning.placement import Placement
from distca.planning.spans import Ints
from distca.planning.tasks import Tasks

Price = Callable[[Ints, Ints, Ints], Ints]  # (queries, keys, pairs) -> picoseconds


class DoesNotFitError(ValueError):
    """Tasks have to go to servers that have no memory for them."""


@dataclass(frozen=True)
class Grain:
    """Where documents may be cut: multiples of ``tile`` from their start, pieces >= ``minimum``."""

    tile: int = 128
    minimum: int = 128

    def __post_init__(self) -> None:
        if self.tile < 1 or self.minimum < 1:
            raise ValueError(
                f"tile = {self.tile} and minimum shard = {self.minimum}: both must be >= 1 token"
            )

    @property
    def step(self) -> int:
        """Tokens between possible cuts, so that no piece falls below the minimum."""
        return self.tile * -(-self.minimum // self.tile)


@dataclass(frozen=True)
class Documents:
    """All documents of a batch, priced in one direction or in both together."""

    lengths: Ints
    reach: Ints
    price: Price

    def load(self, document: Ints, start: Ints, stop: Ints) -> Ints:
        """Picoseconds of queries [start, stop) of each document; an empty span costs nothing."""
        length, reach = self.lengths[document], self.reach[document]
        keys = masks.last_key(stop, length, reach) - masks.first_key(start, reach)
        pairs = masks.pairs(start, stop, length, reach)
        return self.price(stop - start, keys, pairs) * (stop > start)

    @cached_property
    def whole(self) -> Ints:
        """[documents] the load of each, uncut."""
        everything = np.arange(len(self.lengths), dtype=np.int64)
        return self.load(everything, np.zeros_like(self.lengths), self.lengths)


@dataclass(frozen=True)
class Problem:
    """Tokens on workers, ranks that may serve, and what things cost."""

    placement: Placement
    reach: Ints  # [documents]
    devices: Devices
    shape: ModelShape
    cost: CostModel
    tolerance: float
    grain: Grain
    cp: int  # workers that share a packed sequence, for the context-parallel policies
    search_orders: int = 8  # orders that the scheduler tries where there are few ranks

    def documents(self, price: Price) -> Documents:
        return Documents(self.placement.lengths, self.reach, price)


@dataclass(frozen=True)
class Assignment:
    """Tasks of both directions on servers: what a scheduler returns.

    gather: if above 0, keys are all-gathered over groups of this many workers.
    """

    forward: Tasks
    backward: Tasks
    gather: int = 0

    def work_ps(self, problem: Problem) -> tuple[Ints, Ints]:
        """[ranks] forward and backward work, in picoseconds of a device of speed 1."""
        placement, reach, ranks = problem.placement, problem.reach, problem.devices.num_ranks
        forward, _ = self.forward.work_ps(placement, reach, problem.cost, ranks)
        _, backward = self.backward.work_ps(placement, reach, problem.cost, ranks)
        return forward, backward
