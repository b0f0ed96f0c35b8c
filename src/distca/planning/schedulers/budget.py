"""How much one schedule may search.

Work is counted in requests for cuts and not in seconds, because all ranks have to find the same
plan. A search that has used up its budget ends where it is: documents that are lighter than the
surplus of their rank leave as a whole, and single moves do the rest (``repair``).
"""

from __future__ import annotations

from collections.abc import Sequence

from distca.planning.devices import UNLIMITED
from distca.planning.problem import Problem

BUDGET = 300  # requests that all orders of a direction may evaluate: about 0.03 s
FEW_TILES = 24  # of tokens on a rank, below which half of it does: single moves do as well
MANY_RANKS = 64  # up to which it is the same
BUDGET_OF_MANY = 415  # of more ranks
NUM_STEPS = 14  # of more ranks, which shed in eight batches
EVALUATION = 16  # requests that take as long as an evaluation does beside its requests
FEW_SERVERS = 2  # of a request; pieces for others are found one after the other
SERVER = 3  # requests that take as long as each other server of the widest request


class Budget:
    """The work that is left to a search."""

    def __init__(self, left: int, steps_left: int = UNLIMITED) -> None:
        self.left, self.steps_left = left, steps_left

    @classmethod
    def of(cls, problem: Problem) -> Budget:
        ranks = problem.devices.num_ranks
        few_tiles = int(problem.placement.tokens.sum()) < FEW_TILES * problem.grain.spacing * ranks
        many = ranks > MANY_RANKS
        budget = BUDGET // 2 if few_tiles else BUDGET_OF_MANY if many else BUDGET
        return cls(budget, NUM_STEPS) if many else cls(budget)

    def spend(self, work: int) -> None:
        """Counts a step of the search."""
        self.left -= work
        self.steps_left -= 1

    @property
    def is_spent(self) -> bool:
        return self.left <= 0 or self.steps_left <= 0


def work_of(num_servers: Sequence[int]) -> int:
    """Returns the work of one evaluation.

    num_servers: for how many servers each of its requests is.
    """
    if not num_servers:
        return 0
    return EVALUATION + len(num_servers) + SERVER * max(max(num_servers) - FEW_SERVERS, 0)
