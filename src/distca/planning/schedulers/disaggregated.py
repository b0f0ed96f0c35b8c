"""distca's scheduler: tokens stay where they are, and tasks move until every rank meets the bound.

1. A rank may have a load up to its capacity, (1 + tolerance) x mean. Its surplus must move.
2. Workers that do not serve give away all their shards (``whole_shards``).
3. Shards move to the worker that holds their keys, if this moves fewer bytes (``whole_shards``).
4. Ranks with a surplus shed it, one rank after the other (``shedding``).
5. If pieces of the right size do not exist, single tasks move (``repair``).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from distca.planning.costs.base import OneDirectionCost
from distca.planning.problem import Assignment, Price, Problem
from distca.planning.schedulers.ledger import Ledger
from distca.planning.schedulers.placed_shards import PlacedShards
from distca.planning.schedulers.repair import repair
from distca.planning.schedulers.shedding import shed, surplus_ranks
from distca.planning.schedulers.whole_shards import empty_idle_workers, move_to_keys
from distca.planning.tasks import Tasks

# docs/planning.md ("What was tried") has the figures behind the constants of all steps.
NUM_TRIES = 6  # estimates of the mean; of 400 plans one needed more than two, none more than four
MARGIN = 0.002  # on the estimated mean: a tenth of the default tolerance


class SearchOrder(NamedTuple):
    """Choices that no rule settles for every batch."""

    senders_first: float  # see ``shedding.surplus_ranks``
    max_adopted: float  # see ``whole_shards.move_to_keys``
    seed: int = 0  # above 0: ranks shed their surplus in a random order


# The first is the best on average; each of the others is the best on some batches of few ranks.
SEARCH_ORDERS = (
    SearchOrder(senders_first=0.75, max_adopted=0.25),
    SearchOrder(senders_first=2.0, max_adopted=0.25),  # no rank reaches 2.0: no senders first
    SearchOrder(senders_first=0.75, max_adopted=0.0),
    SearchOrder(senders_first=2.0, max_adopted=0.0),
    *(SearchOrder(senders_first=0.0, max_adopted=0.25, seed=seed) for seed in range(1, 5)),
)
FEW_RANKS = 32  # up to which all orders are tried; with more ranks, differences average out


def disaggregated(problem: Problem) -> Assignment:
    """Returns one set of tasks if it meets the bounds of both directions, else one for each."""
    devices = problem.devices
    backward = schedule(problem, problem.cost.backward_ps)
    work, _ = backward.work_ps(problem.placement, problem.reach, problem.cost, devices.num_ranks)
    # If both directions cost the same, a second set of tasks would be equal to the first.
    one_direction = isinstance(problem.cost, OneDirectionCost)
    if one_direction or devices.imbalance(work) <= 1.0 + problem.tolerance:
        return Assignment(backward, backward)
    forward = schedule(problem, problem.cost.forward_ps, expected_work=int(work.sum()))
    return Assignment(forward, backward)


def schedule(
    problem: Problem,
    price: Price,
    orders: Sequence[SearchOrder] = SEARCH_ORDERS,
    expected_work: int = 0,
) -> Tasks:
    """Returns the tasks of one direction, which meet the bound wherever the cuts allow it.

    expected_work: an estimate of the total work after cutting; 0 if there is none.
    """
    shards = PlacedShards.of(problem, price)
    first, *others = orders[: problem.search_orders]
    candidates = [_try_order(shards, first, int(expected_work * (1.0 - MARGIN)))]
    # If the first order misses the bound or moves nothing, the others are no better.
    missed, moved = candidates[0].quality
    if problem.devices.num_ranks <= FEW_RANKS and missed == 0.0 and moved > 0:
        total_work = candidates[0].total_work
        candidates += [_try_order(shards, order, total_work) for order in others]
    return min(candidates, key=lambda candidate: candidate.quality).tasks


class _Candidate(NamedTuple):
    tasks: Tasks
    quality: tuple[float, int]  # imbalance above the bound; peak traffic x total traffic
    total_work: int  # from which the mean was taken


def _try_order(shards: PlacedShards, order: SearchOrder, total_work: int) -> _Candidate:
    """Schedules in one order, with new estimates of the mean until the bound is met.

    Cutting changes the total work, and with it the mean that the bound refers to. If the bound is
    missed, the next try takes the mean of the work that the last one arrived at.

    total_work: the first estimate; 0: the work of uncut shards.
    """
    problem = shards.problem
    bound = 1.0 + problem.tolerance
    tries: list[tuple[float, Ledger, int]] = []
    for _ in range(NUM_TRIES):
        ledger = Ledger(shards, total_work)
        empty_idle_workers(ledger)
        move_to_keys(ledger, order.max_adopted)
        for rank in surplus_ranks(ledger, order.senders_first, order.seed):
            shed(ledger, rank)
        imbalance = problem.devices.imbalance(ledger.loads.per_rank)
        unchanged = bool(tries) and imbalance == tries[-1][0]
        tries.append((imbalance, ledger, total_work))
        if imbalance <= bound or unchanged:
            break
        stuck = bool(np.any(ledger.loads.above_capacity > 0))
        margin = MARGIN if stuck else -MARGIN
        total_work = int(int(ledger.loads.per_rank.sum()) * (1.0 + margin))
    imbalance, ledger, total_work = min(tries, key=lambda attempt: attempt[0])
    tasks, moved = ledger.tasks(), ledger.peak_traffic * ledger.total_traffic
    if imbalance > bound:
        tasks, imbalance = repair(problem, shards.price, tasks)
    return _Candidate(tasks, (max(imbalance - bound, 0.0), moved), total_work)
