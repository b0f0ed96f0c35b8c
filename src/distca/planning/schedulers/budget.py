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
BUDGET_OF_MANY = 415  # of more ranks,
BUDGET_WITH_PREFIXES = 275  # where documents share some, whose keys have more holders to look at,
SLICES_A_REQUEST = 5  # less one for so many slices that a placer has dealt, each about 0.03 ms,
OF_A_FALLBACK = 140  # and so many less where it may schedule one more placement than others do,
LEAST_OF_MANY = 60  # but not less than that
NUM_STEPS = 14  # of more ranks, which shed in eight batches
LEFT_FOR_A_STEP = 0.5  # of more ranks: share of the last step's work that another one needs
EVALUATION = 16  # requests that take as long as an evaluation does beside its requests
FEW_SERVERS = 2  # of a request; pieces for others are found one after the other
SERVER = 3  # requests that take as long as each other server of the widest request


class Budget:
    """The work that is left to a search."""

    def __init__(
        self, left: int, steps_left: int = UNLIMITED, left_for_a_step: float = 0.0
    ) -> None:
        self.left, self.steps_left = left, steps_left
        self._left_for_a_step, self._last_work = left_for_a_step, 0

    @classmethod
    def of(cls, problem: Problem, taken: int = 0) -> Budget:
        """Returns the budget of one direction.

        taken: requests whose time the placer takes, so that it is not there for the search.
        """
        ranks = problem.devices.num_ranks
        few_tiles = int(problem.placement.tokens.sum()) < FEW_TILES * problem.grain.spacing * ranks
        if ranks <= MANY_RANKS:
            return cls(BUDGET // 2 if few_tiles else BUDGET)
        shared = problem.placement.prefixes.exist
        of_many = BUDGET_WITH_PREFIXES if shared else BUDGET_OF_MANY
        left = max((BUDGET // 2 if few_tiles else of_many) - taken, LEAST_OF_MANY)
        return cls(left, NUM_STEPS, LEFT_FOR_A_STEP)

    def spend(self, work: int) -> None:
        """Counts a step of the search."""
        self.left -= work
        self.steps_left -= 1
        self._last_work = work

    @property
    def is_spent(self) -> bool:
        """Whether too little is left for a step like the last one."""
        return self.left <= self._left_for_a_step * self._last_work or self.steps_left <= 0


def work_of(num_servers: Sequence[int]) -> int:
    """Returns the work of one evaluation.

    num_servers: for how many servers each of its requests is.
    """
    if not num_servers:
        return 0
    return EVALUATION + len(num_servers) + SERVER * max(max(num_servers) - FEW_SERVERS, 0)
