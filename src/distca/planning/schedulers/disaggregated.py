"""distca's scheduler: tokens stay where they are, and tasks move until every rank meets the bound.

1. A rank may have a load up to its capacity, (1 + tolerance) x mean. Its surplus must move.
2. Workers that do not serve give away all their shards (``whole_shards``).
3. Shards move to the worker that holds their keys, if this moves fewer bytes (``whole_shards``).
4. Ranks with a surplus shed it (``surplus``, ``shedding``).
5. If pieces of the right size do not exist, single tasks move (``repair``).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from distca.planning.devices import UNLIMITED
from distca.planning.problem import Assignment, Problem
from distca.planning.schedulers.ledger import MARGIN, Ledger
from distca.planning.schedulers.orders import SEARCH_ORDERS, OrderSearch, SearchOrder
from distca.planning.schedulers.placed_shards import FEW_RANKS, PlacedShards
from distca.planning.schedulers.surplus import estimate_added_load
from distca.planning.tasks import Tasks

# docs/planning.md ("What was tried") has the figures behind the constants of all steps.
CUT_SHARE = 0.4  # of the estimate of the load that cutting adds: one that is too high is missed
FEW_SHARDS = 16384  # up to so many, and few ranks, several orders are tried


class Schedule(NamedTuple):
    """The tasks of one direction, and the search order that led to them."""

    tasks: Tasks
    order: SearchOrder


def disaggregated(problem: Problem) -> Assignment:
    """Returns one set of tasks if it meets the bounds of both directions, else one for each."""
    devices, cost = problem.devices, problem.cost
    shards = PlacedShards.of(problem, cost.backward)
    backward, order = schedule(shards, SEARCH_ORDERS[: problem.search_orders])
    load = backward.load_ps(problem.placement, problem.reach, cost.forward, devices.num_ranks)
    # If both directions cost the same, a second set of tasks would be equal to the first.
    if cost.forward is cost.backward or devices.imbalance(load) <= 1.0 + problem.tolerance:
        return Assignment(backward, backward)
    # A little less than the load of the backward tasks: capacities rise with the load if need be.
    expected_load = int(int(load.sum()) * (1.0 - 2.0 * MARGIN))
    shards = shards.with_cost(cost.forward)
    # The best order of one direction is nearly as good as the best of all in the other one.
    orders = dict.fromkeys((order, SEARCH_ORDERS[0]))
    forward, _ = schedule(shards, tuple(orders), expected_load=expected_load)
    return Assignment(forward, backward)


def schedule(
    shards: PlacedShards,
    orders: Sequence[SearchOrder],
    *,
    expected_load: int = 0,
    max_peak: int = UNLIMITED,
) -> Schedule:
    """Returns the tasks of one direction, which meet the bound wherever the cuts allow it.

    orders: search orders to try; only the first one if there are many ranks.
    expected_load: an estimate of the total load after cutting; 0: it is made here.
    max_peak: peak traffic above which ``TooMuchTrafficError`` is raised.
    """
    problem, ledger = shards.problem, Ledger(shards, expected_load)
    fetches_none = bool(shards.is_document.all()) or problem.devices.num_ranks == 1
    if fetches_none and not np.any(ledger.loads.above_capacity > 0):
        return Schedule(ledger.tasks(), orders[0])  # there is nothing to gain, as with one rank
    if not expected_load:
        added = estimate_added_load(ledger)
        expected_load = int(shards.load.sum()) + int(CUT_SHARE * added)
    few = problem.devices.num_ranks <= FEW_RANKS and len(shards.load) <= FEW_SHARDS
    best = OrderSearch(shards, max_peak).run(orders if few else orders[:1], expected_load)
    return Schedule(best.tasks, best.order)
