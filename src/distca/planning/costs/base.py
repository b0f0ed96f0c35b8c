"""Cost models: what tasks take, in whole picoseconds.

A task is described by three numbers: queries, keys, and query-key pairs. The costs of many tasks
are computed at once, by a fixed sequence of IEEE operations: plans are the same on every platform.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, Self

from distca.planning.spans import Ints

PS = 1e12  # picoseconds in a second
BACKWARD_FLOPS = 2.5  # relative to forward: five matrix products instead of two
BACKWARD_TIMES = 2  # FLOPs of a linear layer in backward over forward
LINEAR_TFLOPS = 610.0  # the linear layers of Llama-3-8B, measured on an H200


class TaskCost(Protocol):
    """What tasks cost in one direction, or in both together."""

    @property
    def min_ps_per_pair(self) -> float:
        """A lower bound of what any task costs, per query-key pair."""
        ...

    def ps(self, queries: Ints, keys: Ints, pairs: Ints) -> Ints:
        """[tasks] Returns the picoseconds of each task."""
        ...

    def plus(self, other: Self, weight: float) -> Self:
        """Returns this cost + weight x another of its kind, which takes the time of one."""
        ...


@dataclass(frozen=True)
class CostModel:
    """What tasks cost in both directions, and the rate of the linear layers beside them."""

    name: str  # shown in reports
    forward: TaskCost
    backward: TaskCost
    linear_tflops: float = LINEAR_TFLOPS

    def of(self, *, backward: bool) -> TaskCost:
        return self.backward if backward else self.forward

    def one_way(self, *, backward: bool) -> CostModel:
        """Returns costs for a plan that is used in one direction only: both are equal to it."""
        cost = self.of(backward=backward)
        return replace(self, forward=cost, backward=cost)

    def for_causal_tasks(self) -> CostModel:
        """Returns the same costs for causal tasks, which some models compute in less time."""
        forward, backward = (
            getattr(cost, "for_causal_tasks", cost) for cost in (self.forward, self.backward)
        )
        return replace(self, forward=forward, backward=backward)

    def both(self, forward_weight: float = 1.0) -> TaskCost:
        """Returns the costs of forward and backward together."""
        return self.backward.plus(self.forward, forward_weight)


@dataclass(frozen=True)
class PerPair:
    """A constant for each query-key pair. Cutting a task changes no cost."""

    min_ps_per_pair: int

    def ps(self, queries: Ints, keys: Ints, pairs: Ints) -> Ints:
        return self.min_ps_per_pair * pairs

    def plus(self, other: Self, weight: float) -> Self:
        return replace(
            self, min_ps_per_pair=round(self.min_ps_per_pair + weight * other.min_ps_per_pair)
        )


# Counts query-key pairs, as FLOP-counting planners do. Pairs are not seconds, so the linear layers
# take no time.
PAIRS = CostModel("pairs", forward=PerPair(2), backward=PerPair(5), linear_tflops=float("inf"))
