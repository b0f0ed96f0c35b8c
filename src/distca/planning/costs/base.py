"""The interface of cost models, and the two simplest ones.

A cost model prices arrays of tasks, forward and backward, from three numbers for each task:
queries, keys, and query-key pairs. Prices are whole picoseconds, computed by a fixed sequence of
IEEE operations, so that plans are the same on every platform.
"""

from dataclasses import dataclass
from typing import Protocol

from distca.planning.spans import Ints

PS = 1e12  # picoseconds in a second
BACKWARD_FLOPS = 2.5  # relative to forward: five matrix products instead of two
LINEAR_TFLOPS = 610.0  # the linear layers of Llama-3-8B, measured on an H200


class CostModel(Protocol):
    """Picoseconds of tasks. Reports show ``name``."""

    @property
    def name(self) -> str: ...

    @property
    def min_forward_ps_per_pair(self) -> float:
        """A lower bound of what any task costs in forward, per query-key pair."""
        ...

    @property
    def min_backward_ps_per_pair(self) -> float:
        """A lower bound of what any task costs in backward, per query-key pair."""
        ...

    @property
    def linear_tflops(self) -> float:
        """The rate of the linear layers."""
        ...

    def forward_ps(self, queries: Ints, keys: Ints, pairs: Ints) -> Ints: ...

    def backward_ps(self, queries: Ints, keys: Ints, pairs: Ints) -> Ints: ...


@dataclass(frozen=True)
class PairsCost:
    """Counts query-key pairs, as FLOP-counting planners do. Cutting a task changes no cost."""

    name: str = "pairs"
    min_forward_ps_per_pair: float = 2.0
    min_backward_ps_per_pair: float = 5.0
    linear_tflops: float = float("inf")  # pairs are not seconds, so linear layers take no time

    def forward_ps(self, queries: Ints, keys: Ints, pairs: Ints) -> Ints:
        return 2 * pairs

    def backward_ps(self, queries: Ints, keys: Ints, pairs: Ints) -> Ints:
        return 5 * pairs


@dataclass(frozen=True)
class OneDirectionCost:
    """Prices both directions like one of them, for a plan that is used in that direction only."""

    model: CostModel
    backward: bool

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def linear_tflops(self) -> float:
        return self.model.linear_tflops

    @property
    def min_forward_ps_per_pair(self) -> float:
        model = self.model
        return model.min_backward_ps_per_pair if self.backward else model.min_forward_ps_per_pair

    min_backward_ps_per_pair = min_forward_ps_per_pair

    def forward_ps(self, queries: Ints, keys: Ints, pairs: Ints) -> Ints:
        price = self.model.backward_ps if self.backward else self.model.forward_ps
        return price(queries, keys, pairs)

    backward_ps = forward_ps
