"""The input of placers and schedulers, and the output of schedulers."""

from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property

import numpy as np

from distca.planning.costs.base import CostModel
from distca.planning.devices import UNLIMITED, Devices
from distca.planning.document_masks import CostFunction, DocumentMasks
from distca.planning.models import ModelShape
from distca.planning.placement import Placement
from distca.planning.spans import IntOrInts, Ints
from distca.planning.tasks import Tasks


class DoesNotFitError(ValueError):
    """Raised when tasks have to go to servers that have no memory for them."""


@dataclass(frozen=True)
class Grain:
    """Where documents may be cut: at multiples of ``tile`` tokens, into pieces >= ``min_shard``."""

    tile: int = 128
    min_shard: int = 128

    def __post_init__(self) -> None:
        if self.tile < 1 or self.min_shard < 1:
            raise ValueError(
                f"tile = {self.tile} and minimum shard = {self.min_shard}: both must be >= 1 token"
            )

    @cached_property
    def spacing(self) -> int:
        """Tokens between possible cuts: whole tiles, at least ``min_shard``."""
        return self.tile * -(-self.min_shard // self.tile)

    def first_cut(self, start: IntOrInts) -> IntOrInts:
        """Returns the first possible cut behind ``start``, as a multiple of ``spacing``."""
        return -(-(start + self.min_shard) // self.spacing)

    def last_cut(self, stop: IntOrInts) -> IntOrInts:
        """Returns the last possible cut before ``stop``, as a multiple of ``spacing``."""
        return (stop - self.min_shard) // self.spacing


@dataclass(frozen=True)
class DocumentLoads:
    """The loads of spans of documents, in one direction or in both together."""

    masks: DocumentMasks
    prefix: Ints  # [documents] tokens that belong to another document
    cost_ps: CostFunction

    def load(self, document: Ints, start: Ints, stop: Ints) -> Ints:
        """Returns the load of queries [start, stop) of each document; empty spans have load 0."""
        return self.masks.load(document, start, stop, self.cost_ps)

    @property
    def lengths(self) -> Ints:
        """[documents] With prefixes."""
        return self.masks.lengths

    def load_of_shards(self, document: Ints, start: Ints, stop: Ints) -> Ints:
        """Returns the same for shards, of which most are whole documents."""
        load = self.whole[document]
        cut = np.flatnonzero((start > self.prefix[document]) | (stop < self.lengths[document]))
        load[cut] = self.load(document[cut], start[cut], stop[cut])
        return load

    @cached_property
    def tokens(self) -> Ints:
        """[documents] The tokens of each document, without its prefix."""
        return self.lengths - self.prefix

    @cached_property
    def densest_first(self) -> Ints:
        """Documents by load per token: the longest, and those much shorter than a tile, first."""
        return np.argsort(-(self.whole / self.tokens), kind="stable")

    @cached_property
    def whole(self) -> Ints:
        """[documents] The load of each document without cuts."""
        documents = np.arange(len(self.lengths), dtype=np.int64)
        return self.load(documents, self.prefix, self.lengths)


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
    token_ps: int = 0  # of everything but attention, for placers that balance whole steps
    max_tokens: int = UNLIMITED  # of a worker, likewise

    def check_max_tokens(self, placement: Placement) -> None:
        """Raises ``ValueError`` if a worker has more than ``max_tokens``."""
        worst = int(np.argmax(placement.tokens))
        if placement.tokens[worst] > self.max_tokens:
            raise ValueError(
                f"worker {worst} has {placement.tokens[worst]} tokens, but max_tokens is"
                f" {self.max_tokens}, and no other worker has room for one of its documents: raise"
                " max_tokens, or use more workers or smaller batches"
            )

    @cached_property
    def document_ps(self) -> Ints:
        """[documents] The time of one layer, forward and backward: a L, and b L^2 of attention.

        The second term is what the cost model says of the pairs that the mask allows.
        """
        attention = self.document_loads(self.cost.both().ps).whole
        return attention + self.token_ps * self.placement.lengths

    @cached_property
    def masks(self) -> DocumentMasks:
        return self.placement.masks(self.reach)

    def document_loads(self, cost_ps: CostFunction) -> DocumentLoads:
        return DocumentLoads(self.masks, self.placement.prefixes.length, cost_ps)


def same_fields(one: object, other: object) -> bool:
    """Returns whether two records are equal in every field, and records and arrays in them too."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)  # type: ignore[arg-type]
    if not is_dataclass(one):
        return one == other
    names = (field.name for field in fields(one))
    return all(same_fields(getattr(one, name), getattr(other, name)) for name in names)


@dataclass(frozen=True)
class Assignment:
    """Tasks of both directions on servers, as a scheduler returns them.

    gather: the number of workers that all-gather their keys in the published system; 0: none.
    """

    forward: Tasks
    backward: Tasks
    gather: int = 0

    def load_ps(self, problem: Problem) -> tuple[Ints, Ints]:
        """[ranks] Returns the forward and the backward load of each rank."""
        placement, reach, ranks = problem.placement, problem.reach, problem.devices.num_ranks
        return (
            self.forward.load_ps(placement, reach, problem.cost.forward, ranks),
            self.backward.load_ps(placement, reach, problem.cost.backward, ranks),
        )
