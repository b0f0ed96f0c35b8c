"""What a task costs, in whole picoseconds, forward and backward.

Every model prices arrays of tasks from three numbers each: queries, keys, and query-key pairs.
Results are integers, made by a fixed sequence of IEEE operations, so that a plan built on them is
the same on every platform.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from distca.planning.spans import Ints

PS = 1e12  # picoseconds in a second
BACKWARD_FLOPS = 2.5  # of forward: five products where forward has two
LINEAR_TFLOPS = 610.0  # a layer of Llama-3-8B but for its attention, on an H200


class CostModel(Protocol):
    """Seconds of a task; ``name`` says in reports what was balanced."""

    @property
    def name(self) -> str: ...

    @property
    def least_forward_ps_per_pair(self) -> float:
        """What no task goes below, forward; for lower bounds."""
        ...

    @property
    def least_backward_ps_per_pair(self) -> float: ...

    @property
    def linear_tflops(self) -> float:
        """The rate of linear layers beside the attention."""
        ...

    def forward_ps(self, queries: Ints, keys: Ints, pairs: Ints) -> Ints: ...

    def backward_ps(self, queries: Ints, keys: Ints, pairs: Ints) -> Ints: ...


@dataclass(frozen=True)
class PairsCost:
    """Arithmetic alone: what FLOP-counting planners balance. Exact, and additive under cutting."""

    name: str = "pairs"
    least_forward_ps_per_pair: float = 2.0
    least_backward_ps_per_pair: float = 5.0
    linear_tflops: float = float("inf")  # no seconds here, so linear layers take none

    def forward_ps(self, queries: Ints, keys: Ints, pairs: Ints) -> Ints:
        return 2 * pairs

    def backward_ps(self, queries: Ints, keys: Ints, pairs: Ints) -> Ints:
        return 5 * pairs


@dataclass(frozen=True)
class OneDirectionCost:
    """A model for a pass in one direction alone, which is then all that a plan must even out."""

    model: CostModel
    backward: bool

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def linear_tflops(self) -> float:
        return self.model.linear_tflops

    @property
    def least_forward_ps_per_pair(self) -> float:
        model = self.model
        return (
            model.least_backward_ps_per_pair if self.backward else model.least_forward_ps_per_pair
        )

    least_backward_ps_per_pair = least_forward_ps_per_pair

    def forward_ps(self, queries: Ints, keys: Ints, pairs: Ints) -> Ints:
        price = self.model.backward_ps if self.backward else self.model.forward_ps
        return price(queries, keys, pairs)

    backward_ps = forward_ps
