"""distca's scheduler: tokens stay where they are, and tasks move until every rank meets the bound.

1. A rank may have a load up to its capacity, (1 + tolerance) x mean. Its surplus must move.
2. Workers that do not serve give away all their shards (``whole_shards``).
3. Shards move to the worker that holds their keys, if this moves fewer bytes (``whole_shards``).
4. Ranks with a surplus shed it (``surplus``, ``shedding``).
5. If pieces of the right size do not exist, single tasks move (``repair``).
"""

from collections.abc import Generator, Sequence
from typing import NamedTuple

import numpy as np

from distca.planning.problem import Assignment, Problem
from distca.planning.schedulers.ledger import MARGIN, Ledger
from distca.planning.schedulers.placed_shards import FEW_RANKS, PlacedShards
from distca.planning.schedulers.repair import repair
from distca.planning.schedulers.shedding import Found, Wanted, evaluate, shed
from distca.planning.schedulers.surplus import (
    estimate_added_load,
    surplus_ranks,
    workers_above_capacity,
)
from distca.planning.schedulers.whole_shards import empty_idle_workers, move_to_keys
from distca.planning.tasks import Tasks

# docs/planning.md ("What was tried") has the figures behind the constants of all steps.
NUM_TRIES = 4  # estimates of the load after cutting
CUT_SHARE = 0.4  # of the estimate of the load that cutting adds: one that is too high is missed


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
FEW_SHARDS = 16384  # up to so many, and few ranks, all orders are tried


def disaggregated(problem: Problem) -> Assignment:
    """Returns one set of tasks if it meets the bounds of both directions, else one for each."""
    devices, cost = problem.devices, problem.cost
    shards = PlacedShards.of(problem, cost.backward)
    backward = schedule(shards)
    load = backward.load_ps(problem.placement, problem.reach, cost.forward, devices.num_ranks)
    # If both directions cost the same, a second set of tasks would be equal to the first.
    if cost.forward is cost.backward or devices.imbalance(load) <= 1.0 + problem.tolerance:
        return Assignment(backward, backward)
    # A little less than the load of the backward tasks: capacities rise with the load if need be.
    expected_load = int(int(load.sum()) * (1.0 - 2.0 * MARGIN))
    shards = shards.with_cost(cost.forward)
    return Assignment(schedule(shards, expected_load=expected_load), backward)


def schedule(
    shards: PlacedShards,
    orders: Sequence[SearchOrder] = SEARCH_ORDERS,
    expected_load: int = 0,
) -> Tasks:
    """Returns the tasks of one direction, which meet the bound wherever the cuts allow it.

    expected_load: an estimate of the total load after cutting; 0: it is made here.
    """
    problem, ledger = shards.problem, Ledger(shards, expected_load)
    fetches_none = bool(shards.is_document.all()) or problem.devices.num_ranks == 1
    if fetches_none and not np.any(ledger.loads.above_capacity > 0):
        return ledger.tasks()  # there is nothing to gain, as in most batches of one rank
    if not expected_load:
        added = estimate_added_load(ledger)
        expected_load = int(shards.load.sum()) + int(CUT_SHARE * added)
    first, *others = _distinct(orders[: problem.search_orders], ledger)
    candidates = _run([_try_order(shards, first, expected_load)])
    # If the first order misses the bound or moves nothing, the others are no better.
    missed, moved = candidates[0].quality
    few = problem.devices.num_ranks <= FEW_RANKS and len(shards.load) <= FEW_SHARDS
    if few and missed == 0.0 and moved > 0:
        candidates += _run([_try_order(shards, order, expected_load) for order in others])
    best = min(candidates, key=lambda candidate: candidate.quality)
    return best.ledger.tasks() if best.tasks is None else best.tasks


def _distinct(orders: Sequence[SearchOrder], ledger: Ledger) -> list[SearchOrder]:
    """Returns the orders that may lead to different tasks."""
    chosen = list(orders)
    all_whole = bool(ledger.shards.is_document.all())
    if all_whole:  # no shard fetches keys, and ``max_adopted`` has no effect
        chosen = [order for order in chosen if order.max_adopted == chosen[0].max_adopted]
    # Of two servers only one can be above its capacity; where no shard moves to its keys, no others
    # than now are.
    one_at_most = len(ledger.problem.devices.serving) <= 2 or (
        all_whole and len(workers_above_capacity(ledger)) <= 1
    )
    if one_at_most:
        chosen = list({order.max_adopted: order for order in reversed(chosen)}.values())[::-1]
    return chosen


class _Candidate(NamedTuple):
    ledger: Ledger
    tasks: Tasks | None  # if the ledger's own tasks had to be repaired
    quality: tuple[float, int]  # imbalance above the bound; peak traffic x total traffic


Try = Generator[tuple[Ledger, Wanted], Found, _Candidate]  # yields questions, as ``shed`` does


def _run(orders: Sequence[Try]) -> list[_Candidate]:
    """Runs tries side by side: the cuts that they ask for are evaluated together."""
    results: dict[Try, _Candidate] = {}
    answers: dict[Try, Found | None] = dict.fromkeys(orders)
    while answers:
        questions = {}
        for one, answer in answers.items():
            try:
                questions[one] = next(one) if answer is None else one.send(answer)
            except StopIteration as end:
                results[one] = end.value
        found = evaluate(list(questions.values()))
        answers = dict(zip(questions, found, strict=True))
    return [results[one] for one in orders]


def _try_order(shards: PlacedShards, order: SearchOrder, expected_load: int) -> Try:
    """Carries out steps 2 to 5 in one order.

    Cutting changes the total load, and with it the mean that the bound refers to. Capacities rise
    with the load of the first try. If they are too high at its end, because the load is lower than
    estimated, or fell again, the next try takes those of the load that the last one arrived at.
    """
    problem = shards.problem
    bound = 1.0 + problem.tolerance
    for number in range(NUM_TRIES):
        ledger = Ledger(shards, expected_load, follows_load=number == 0)
        empty_idle_workers(ledger)
        move_to_keys(ledger, order.max_adopted)
        yield from shed(ledger, surplus_ranks(ledger, order.senders_first, order.seed))
        loads = ledger.loads
        imbalance = problem.devices.imbalance(loads.per_rank)
        if imbalance <= bound or np.any(loads.above_capacity > 0):
            break
        expected_load = int(int(loads.per_rank.sum()) * (1.0 - MARGIN))
    moved, tasks = ledger.peak_traffic * ledger.total_traffic, None
    if imbalance > bound:
        tasks, imbalance = repair(problem, shards.cost, ledger.tasks())
    return _Candidate(ledger, tasks, (max(imbalance - bound, 0.0), moved))
