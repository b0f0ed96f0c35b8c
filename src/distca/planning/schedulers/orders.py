"""Search orders: choices that no rule settles for every batch, tried for batches of few ranks.

With few ranks, most orders let the same ranks shed at first, and many do to the end. So orders
share a *branch*, one ledger, until they differ; then the branch forks. The branch of the first
order is followed to its end. The others then continue side by side, so that the cuts that they ask
for are evaluated together. A branch ends as soon as it moves more than the best plan so far, and
branches that have moved the most end where there are more than a budget allows (``budget``). The
first order ends early, too, where it would need more.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from distca.planning.devices import UNLIMITED
from distca.planning.schedulers.budget import Budget, work_of
from distca.planning.schedulers.idle_workers import empty_idle_workers
from distca.planning.schedulers.ledger import MARGIN, Ledger
from distca.planning.schedulers.moves_to_keys import (
    Moves,
    may_gain,
    move_to_keys,
    possible_moves,
)
from distca.planning.schedulers.placed_shards import PlacedShards
from distca.planning.schedulers.questions import Found, Question, Shedding, evaluate
from distca.planning.schedulers.repair import repair
from distca.planning.schedulers.shedding import shed
from distca.planning.schedulers.short_documents import shed_whole_documents
from distca.planning.schedulers.surplus import SurplusRanks, workers_above_capacity
from distca.planning.tasks import Tasks

NUM_TRIES = 4  # estimates of the load after cutting


class TooMuchTrafficError(Exception):
    """Raised when a schedule would exceed a limit on the peak traffic."""


class SearchOrder(NamedTuple):
    """In which order ranks shed their surplus, and how many shards they adopt before."""

    senders_first: float  # see ``surplus.SurplusRanks``
    max_adopted: float  # see ``moves_to_keys.move_to_keys``
    seed: int = 0  # above 0: ranks shed their surplus in a random order


# The first is the best on average; each of the others is the best on some batches of few ranks.
SEARCH_ORDERS = (
    SearchOrder(senders_first=0.75, max_adopted=0.25),
    SearchOrder(senders_first=2.0, max_adopted=0.25),  # no rank reaches 2.0: no senders first
    SearchOrder(senders_first=0.75, max_adopted=0.0),
    SearchOrder(senders_first=2.0, max_adopted=0.0),
    *(SearchOrder(senders_first=0.0, max_adopted=0.25, seed=seed) for seed in range(1, 5)),
)


class Candidate(NamedTuple):
    """The result of an order."""

    order: SearchOrder
    ledger: Ledger
    repaired: Tasks | None  # if the ledger's own tasks had to be repaired
    missed: float  # imbalance above the bound
    moved: int  # peak traffic x total traffic

    @property
    def quality(self) -> tuple[float, int]:
        return self.missed, self.moved

    @property
    def tasks(self) -> Tasks:
        return self.ledger.tasks() if self.repaired is None else self.repaired


Branch = Shedding[None]


class OrderSearch:
    """Carries out steps 2 to 5 of the scheduler in several orders."""

    def __init__(self, shards: PlacedShards, max_peak: int, budget: Budget) -> None:
        """Prepares a search.

        max_peak: the first order ends if it lets a rank send or receive more.
        """
        self._shards, self._max_peak, self._budget = shards, max_peak, budget
        self._moves_to_keys: Moves | None = None  # those of the first try
        self._first_work: list[int] = []  # of each step of the first order
        self._forks: list[Branch] = []
        self._best: Candidate | None = None

    def run(self, orders: Sequence[SearchOrder], expected_load: int) -> Candidate:
        """Returns the best result of all orders."""
        return self.others(self.first(orders, expected_load))

    def first(self, orders: Sequence[SearchOrder], expected_load: int) -> Candidate:
        """Returns the result of the first order; the others wait where they fork off it.

        Raises ``TooMuchTrafficError`` if it exceeds ``max_peak``.
        """
        self._first_work = self._follow_first(self._try(orders, expected_load))
        if self._best is None:
            raise TooMuchTrafficError
        return self._best

    def others(self, first: Candidate) -> Candidate:
        """Continues with the other orders, and returns the best result of all.

        If the first order misses the bound or moves nothing, the others are no better.
        """
        self._max_peak = UNLIMITED
        # The other direction will take about as much work as the first order.
        budget = self._budget.left - sum(self._first_work)
        if first.missed == 0.0 and first.moved > 0 and budget > 0:
            self._follow_forks(budget, budget // max(len(self._first_work), 1))
        assert self._best is not None
        return self._best

    def _follow_first(self, branch: Branch) -> list[int]:
        """Runs a branch to its end without what forks off it; returns the work of each step."""
        work = []
        answers: dict[Branch, Found | None] = {branch: None}
        while questions := _ask(answers):
            work.append(_work(questions.values()))
            self._budget.spend(work[-1])
            answers = _answer(questions)
        return work

    def _follow_forks(self, budget: int, most: int) -> None:
        """Runs what has forked off side by side, the branches that have moved the least first.

        budget: the work of all steps.
        most: that of one step, so that the budget lasts as long as the first order took.
        """
        answers: dict[Branch, Found | None] = dict.fromkeys(self._take_forks())
        while answers:
            questions = _least_moved(_ask(answers), min(most, budget))
            budget -= _work(questions.values())
            answers = _answer(questions) | dict.fromkeys(self._take_forks())

    def _take_forks(self) -> list[Branch]:
        forks, self._forks = self._forks, []
        return forks

    def _try(self, orders: Sequence[SearchOrder], expected_load: int, number: int = 0) -> Branch:
        """Carries out steps 2 and 3, after which orders with another ``max_adopted`` may fork.

        Cutting changes the total load, and with it the mean that the bound refers to. Capacities
        rise with the load of the first try. If they are too high at its end, because the load is
        lower than estimated, or fell again, the next try takes those of the load that the last one
        arrived at.

        number: how many tries came before.
        """
        start = Ledger(self._shards, expected_load, follows_load=number == 0)
        empty_idle_workers(start, self._max_peak)
        if self._moves_to_keys is None:
            self._moves_to_keys = possible_moves(self._shards, may_gain(start))
        groups: dict[bytes, tuple[Ledger, list[SearchOrder]]] = {}
        for max_adopted in dict.fromkeys(order.max_adopted for order in orders):
            ledger = start.copy()
            move_to_keys(ledger, self._moves_to_keys, max_adopted)
            _, members = groups.setdefault(ledger.server.tobytes(), (ledger, []))
            members += [order for order in orders if order.max_adopted == max_adopted]
        first, *others = (
            self._shed(
                ledger,
                {},
                {order: SurplusRanks(ledger, order.senders_first, order.seed) for order in members},
                number,
            )
            for ledger, members in groups.values()
        )
        self._forks += others
        yield from first

    def _shed(
        self,
        ledger: Ledger,
        waiting: dict[int, int],
        orders: dict[SearchOrder, SurplusRanks],
        number: int,
    ) -> Branch:
        """Carries out step 4 in the first of some orders; others fork where the next ranks differ.

        waiting: see ``shed``.
        """
        next_ranks: tuple[int, ...] | None = None
        while next_ranks != () and not self._budget.is_spent:
            groups: dict[tuple[int, ...], dict[SearchOrder, SurplusRanks]] = {}
            for order, ranks in orders.items():
                groups.setdefault(tuple(ranks.next_batch(ledger)), {})[order] = ranks
            (next_ranks, orders), *others = groups.items()
            self._forks += [
                self._shed(ledger.copy(), dict(waiting), members, number) for _, members in others
            ]
            for ranks in orders.values():
                ranks.remove(next_ranks)
            if self._is_worse(ledger):
                return
            yield from shed(ledger, waiting, next_ranks, self._budget)
        if self._budget.is_spent:
            shed_whole_documents(ledger, workers_above_capacity(ledger).tolist())
        yield from self._end(ledger, list(orders), number)

    def _is_worse(self, ledger: Ledger) -> bool:
        """Returns whether a branch moves as much as the best result already, or too much."""
        best = self._best
        beaten = best is not None and best.missed == 0.0 and ledger.moved >= best.moved
        return beaten or ledger.peak_traffic > self._max_peak

    def _end(self, ledger: Ledger, orders: Sequence[SearchOrder], number: int) -> Branch:
        """Starts the next try, or carries out step 5 and keeps the result if it is the best."""
        problem, loads = self._shards.problem, ledger.loads
        bound = 1.0 + problem.tolerance
        imbalance, tasks = problem.devices.imbalance(loads.per_rank), None
        again = number + 1 < NUM_TRIES and not self._budget.is_spent
        if imbalance > bound and again and not np.any(loads.above_capacity > 0):
            expected_load = int(int(loads.per_rank.sum()) * (1.0 - MARGIN))
            yield from self._try(orders, expected_load, number + 1)
            return
        if self._is_worse(ledger):
            return
        if imbalance > bound:
            tasks, imbalance = repair(problem, self._shards.cost, ledger.tasks())
        result = Candidate(orders[0], ledger, tasks, max(imbalance - bound, 0.0), ledger.moved)
        if self._best is None or result.quality < self._best.quality:
            self._best = result


def _ask(answers: Mapping[Branch, Found | None]) -> dict[Branch, Question]:
    """Continues branches with their answers; returns the next questions of those that go on."""
    questions = {}
    for branch, answer in answers.items():
        with suppress(StopIteration):
            questions[branch] = next(branch) if answer is None else branch.send(answer)
    return questions


def _answer(questions: Mapping[Branch, Question]) -> dict[Branch, Found | None]:
    return dict(zip(questions, evaluate(list(questions.values())), strict=True))


def _least_moved(questions: Mapping[Branch, Question], most: int) -> dict[Branch, Question]:
    """Returns those that together take at most some work, of the branches that moved the least."""
    chosen: dict[Branch, Question] = {}
    for branch, question in sorted(questions.items(), key=lambda item: item[1][0].moved):
        if _work([*chosen.values(), question]) <= most:
            chosen[branch] = question
    return chosen


def _work(questions: Collection[Question]) -> int:
    """Returns how many requests take as long as the questions."""
    asked = [one for _, wanted in questions for requests in wanted.values() for one in requests]
    return work_of([len(request.servers) for request in asked])
