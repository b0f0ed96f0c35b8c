"""The input of placers and schedulers, and the output of schedulers."""

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
    """Raised when tasks have to go to servers that have no memory for them."""


@dataclass(frozen=True)
class Grain:
    """Where documents may be cut: at multiples of ``tile`` tokens, into pieces >= ``minimum``."""

    tile: int = 128
    minimum: int = 128

    def __post_init__(self) -> None:
        if self.tile < 1 or self.minimum < 1:
            raise ValueError(
                f"tile = {self.tile} and minimum shard = {self.minimum}: both must be >= 1 token"
            )

    @property
    def step(self) -> int:
        """Tokens between possible cuts: whole tiles, at least the minimum."""
        return self.tile * -(-self.minimum // self.tile)


@dataclass(frozen=True)
class PricedDocuments:
    """All documents of a batch with a price, of one direction or of both together."""

    lengths: Ints
    reach: Ints
    price: Price

    def load(self, document: Ints, start: Ints, stop: Ints) -> Ints:
        """Returns the load of queries [start, stop) of each document; empty spans have load 0."""
        length, reach = self.lengths[document], self.reach[document]
        keys = masks.last_key(stop, length, reach) - masks.first_key(start, reach)
        pairs = masks.pairs(start, stop, length, reach)
        return self.price(stop - start, keys, pairs) * (stop > start)

    @cached_property
    def whole_load(self) -> Ints:
        """[documents] The load of each document without cuts."""
        documents = np.arange(len(self.lengths), dtype=np.int64)
        return self.load(documents, np.zeros_like(self.lengths), self.lengths)


@dataclass(frozen=True)
class Problem:
    """A placement, the ranks that may serve, and what tasks cost."""

    placement: Placement
    reach: Ints  # [documents]
    devices: Devices
    shape: ModelShape
    cost: CostModel
    tolerance: float
    grain: Grain
    cp: int  # workers in a context-parallel group, for the context-parallel policies
    search_orders: int = 8  # how many orders the scheduler tries if there are few ranks

    def priced_documents(self, price: Price) -> PricedDocuments:
        return PricedDocuments(self.placement.lengths, self.reach, price)


@dataclass(frozen=True)
class Assignment:
    """Tasks of both directions on servers, as a scheduler returns them.

    gather: if above 0, keys are all-gathered over groups of this many workers.
    """

    forward: Tasks
    backward: Tasks
    gather: int = 0

    def work_ps(self, problem: Problem) -> tuple[Ints, Ints]:
        """[ranks] Returns forward and backward work, in picoseconds of a device of speed 1."""
        placement, reach, ranks = problem.placement, problem.reach, problem.devices.num_ranks
        forward, _ = self.forward.work_ps(placement, reach, problem.cost, ranks)
        _, backward = self.backward.work_ps(placement, reach, problem.cost, ranks)
        return forward, backward
