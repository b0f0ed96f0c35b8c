"""distca's scheduler: tokens stay where they are, and tasks move until every rank meets the bound.

1. A rank may have a load up to its capacity, (1 + tolerance) x mean. Its surplus must move.
2. Workers that do not serve give away all their shards (``idle_workers``).
3. Shards move to the worker that holds their keys, if this moves fewer bytes (``moves_to_keys``).
4. Ranks with a surplus shed it (``surplus``, ``shedding``).
5. If pieces of the right size do not exist, or a budget is spent (``budget``), single tasks move
   (``repair``).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from distca.planning.devices import UNLIMITED
from distca.planning.problem import Assignment, Problem, same_fields
from distca.planning.schedulers.budget import Budget
from distca.planning.schedulers.ledger import MARGIN, Ledger
from distca.planning.schedulers.orders import (
    SEARCH_ORDERS,
    Candidate,
    OrderSearch,
    SearchOrder,
    TooMuchTrafficError,
)
from distca.planning.schedulers.placed_shards import FEW_RANKS, PlacedShards
from distca.planning.schedulers.surplus import estimate_added_load

# docs/planning-experiments.md has the figures behind the constants of all steps.
CUT_SHARE = 0.4  # of the estimate of the load that cutting adds: one that is too high is missed
PEAK_AT_HOME = 0.5  # share of the peak allowed above which moving tasks would exceed it
FEW_SHARDS = 16384  # up to so many, and few ranks, several orders are tried


class BegunSchedule(NamedTuple):
    """The schedule of one direction after the first search order."""

    shards: PlacedShards
    first: Candidate
    search: OrderSearch | None  # None: there is nothing to gain by other orders

    def finish(self) -> Candidate:
        """Returns the best of all orders. Called again, it returns the same."""
        return self.first if self.search is None else self.search.others(self.first)


def disaggregated(
    problem: Problem, begun: BegunSchedule | None = None, taken: int = 0
) -> Assignment:
    """Returns one set of tasks if it meets the bounds of both directions, else one for each.

    begun: what ``begin_backward`` returned; it is used if it is that of an equal problem.
    taken: requests whose time the placer takes (``Budget.of``).
    """
    devices, cost = problem.devices, problem.cost
    if begun is None or not same_fields(begun.shards.problem, problem):
        begun = begin_backward(problem, taken)
    best = begun.finish()
    backward = best.tasks
    load = backward.load_ps(problem.placement, problem.reach, cost.forward, devices.num_ranks)
    # If both directions cost the same, a second set of tasks would be equal to the first.
    if cost.forward is cost.backward or devices.imbalance(load) <= 1.0 + problem.tolerance:
        return Assignment(backward, backward)
    # A little less than the load of the backward tasks: capacities rise with the load if need be.
    expected_load = int(int(load.sum()) * (1.0 - 2.0 * MARGIN))
    # The best order of one direction is nearly as good as the best of all in the other one.
    orders = dict.fromkeys((best.order, SEARCH_ORDERS[0]))
    shards = begun.shards.with_cost(cost.forward)
    forward = _begin(shards, tuple(orders), taken, expected_load=expected_load).finish()
    return Assignment(forward.tasks, backward)


def begin_backward(problem: Problem, taken: int = 0, max_peak: int = UNLIMITED) -> BegunSchedule:
    """Begins the schedule of the backward direction.

    taken: requests whose time the placer takes (``Budget.of``).
    max_peak: peak traffic of the first order above which ``TooMuchTrafficError`` is raised; also
        where tasks have to move, and the peak is not far below before any does.
    """
    shards = PlacedShards.of(problem, problem.cost.backward)
    return _begin(shards, SEARCH_ORDERS[: problem.search_orders], taken, max_peak=max_peak)


def _begin(
    shards: PlacedShards,
    orders: Sequence[SearchOrder],
    taken: int,
    *,
    expected_load: int = 0,
    max_peak: int = UNLIMITED,
) -> BegunSchedule:
    """Begins a schedule whose tasks meet the bound wherever the cuts allow it.

    orders: search orders to try; only the first one if there are many ranks.
    expected_load: an estimate of the total load after cutting; 0: it is made here.
    """
    problem, ledger = shards.problem, Ledger(shards, expected_load)
    fetches_none = bool(shards.is_document.all()) or problem.devices.num_ranks == 1
    if fetches_none and not np.any(ledger.loads.above_capacity > 0):  # as with one rank
        return BegunSchedule(shards, Candidate(orders[0], ledger, None, 0.0, 0), None)
    if np.any(ledger.loads.above_capacity > 0) and ledger.peak_traffic > PEAK_AT_HOME * max_peak:
        raise TooMuchTrafficError
    if not expected_load:
        added = estimate_added_load(ledger)
        expected_load = int(shards.load.sum()) + int(CUT_SHARE * added)
    few = problem.devices.num_ranks <= FEW_RANKS and len(shards.load) <= FEW_SHARDS
    search = OrderSearch(shards, max_peak, Budget.of(problem, taken))
    first = search.first(orders if few else orders[:1], expected_load)
    return BegunSchedule(shards, first, search)
