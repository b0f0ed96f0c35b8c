"""Search orders that share branches, compared with orders that are tried one by one."""

from collections.abc import Sequence
from copy import copy
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from distca.data.lengths import distribution
from distca.pipeline.mesh import MeshShape
from distca.pipeline.step_planner import StepPlanner
from distca.planning.api import place_and_plan, place_to_plan, plan
from distca.planning.devices import UNLIMITED
from distca.planning.entries import Entry
from distca.planning.masks import Mask
from distca.planning.models import model_shape
from distca.planning.options import PlanOptions
from distca.planning.placement import Placement
from distca.planning.policies import policy_of
from distca.planning.schedulers import budget, orders, questions
from distca.planning.schedulers.budget import Budget
from distca.planning.schedulers.ledger import Ledger
from distca.planning.schedulers.orders import (
    SEARCH_ORDERS,
    Candidate,
    OrderSearch,
    TooMuchTrafficError,
)
from distca.planning.schedulers.placed_shards import PlacedShards
from distca.planning.schedulers.questions import Found, Question
from distca.planning.traffic import memory_bytes

COSTS = ("pairs", "analytic", "h200")
# Python files of up to 8,192 tokens, 32,768 tokens in all.
FILES = (
    [1024, 8192, 1233, 5568, 8192, 3108, 5451],
    [7838, 2967, 8192, 8192, 5579],
    [5452, 8192, 350, 1020, 8192, 8192, 1370],
    [8192, 2908, 8192, 327, 255, 5134, 7760],
    [8192, 8192, 8192, 4233, 3959],
)


def placed(ranks: list[list[Entry]], cost: str, **options: object) -> PlacedShards:
    options_of = PlanOptions.of(None, {"model": "llama3-8b", "cost": cost, **options})
    problem = options_of.problem(Placement.from_ranks(ranks))
    return PlacedShards.of(problem, problem.cost.backward)


def search_of(
    shards: PlacedShards, max_peak: int = UNLIMITED, budget: Budget | None = None
) -> OrderSearch:
    return OrderSearch(shards, max_peak, budget or Budget.of(shards.problem))


def one_by_one(shards: PlacedShards, expected_load: int) -> Candidate:
    """Tries every order from the start to its end."""
    first, *others = (search_of(shards).run([order], expected_load) for order in SEARCH_ORDERS)
    if first.missed > 0.0 or first.moved == 0:
        return first
    return min([first, *others], key=lambda candidate: candidate.quality)


@settings(max_examples=30, deadline=None)
@given(
    ranks=st.lists(
        st.lists(st.sampled_from([100, 700, 2000, 6000, 8192, 30_000]), max_size=5),
        min_size=2,
        max_size=8,
    ).filter(any),
    cost=st.sampled_from(COSTS),
    servers=st.sampled_from([0, 0, 2]),
)
@example([[], [], [], [6000, 30_000], [8192, 30_000], [100, 100, 100, 30_000]], "analytic", 0)
def test_shared_branches_lead_to_the_best_order(
    ranks: list[list[Entry]], cost: str, servers: int
) -> None:
    shards = placed(ranks, cost, servers=servers)
    expected_load = int(shards.load.sum())
    found = search_of(shards, budget=Budget(UNLIMITED)).run(SEARCH_ORDERS, expected_load)
    assert found.quality == one_by_one(shards, expected_load).quality
    # Of several orders that are as good, the one whose branch ends first is taken.
    alone = search_of(shards).run([found.order], expected_load)
    assert found.quality == alone.quality
    for one, other in zip(vars(found.tasks).values(), vars(alone.tasks).values(), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("lengths", FILES)
def test_documents_that_span_ranks_do_too(lengths: list[int], cost: str) -> None:
    placement = Placement.in_order(np.array(lengths), 4)
    problem = PlanOptions(model="llama3-8b", cost=cost).problem(placement)
    shards = PlacedShards.of(problem, problem.cost.backward)
    expected_load = int(shards.load.sum())
    found = search_of(shards, budget=Budget(UNLIMITED)).run(SEARCH_ORDERS, expected_load)
    assert found.quality == one_by_one(shards, expected_load).quality


@pytest.mark.parametrize("cost", COSTS)
def test_documents_with_a_prefix_do_too(cost: str) -> None:
    continued: Entry = {"length": 700, "parent": 0, "prefix": 4096}
    shards = placed([[4096, *([continued] * 8)], [continued] * 4, [30_000]], cost)
    expected_load = int(shards.load.sum())
    found = search_of(shards, budget=Budget(UNLIMITED)).run(SEARCH_ORDERS, expected_load)
    assert found.moved > 0
    assert found.quality == one_by_one(shards, expected_load).quality


def test_a_limit_on_the_peak_ends_the_search() -> None:
    shards = placed([[30_000], [700] * 4, [700] * 4], "pairs")
    load = int(shards.load.sum())
    peak = search_of(shards).run(SEARCH_ORDERS[:1], load).ledger.peak_traffic
    assert search_of(shards, peak).run(SEARCH_ORDERS[:1], load).ledger.peak_traffic == peak
    with pytest.raises(TooMuchTrafficError):
        search_of(shards, peak - 1).run(SEARCH_ORDERS[:1], load)


def test_the_limit_on_the_peak_is_that_of_the_first_order() -> None:
    """The peak of another order may be higher, if its total is lower."""
    shards = placed([[], [100, 700], [], [2000, 6000], [100], [100, 8192, 100]], "pairs")
    load = int(shards.load.sum())
    best = search_of(shards).run(SEARCH_ORDERS, load)
    peak = search_of(shards).run(SEARCH_ORDERS[:1], load).ledger.peak_traffic
    assert best.ledger.peak_traffic > peak
    search = search_of(shards, peak)
    first = search.first(SEARCH_ORDERS, load)
    assert (first.order, first.ledger.peak_traffic) == (SEARCH_ORDERS[0], peak)
    for _ in range(2):  # the second time, there is nothing left to do
        assert search.others(first).quality == best.quality


def test_a_limit_on_the_peak_ends_before_all_idle_workers_are_empty(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shards = placed([[2000] * 6] * 4, "pairs", servers=2, workers_serve=False)
    load, moved, move_whole = int(shards.load.sum()), [], Ledger.move_whole

    def counted(self: Ledger, shard: int, server: int) -> None:
        moved.append(shard)
        move_whole(self, shard, server)

    monkeypatch.setattr(Ledger, "move_whole", counted)
    peak = search_of(shards).run(SEARCH_ORDERS[:1], load).ledger.peak_traffic
    num_all = len(moved)
    with pytest.raises(TooMuchTrafficError):
        search_of(shards, peak // 4).run(SEARCH_ORDERS[:1], load)
    assert 0 < len(moved) - num_all <= num_all // 2


def counted_work(asked: Sequence[Question]) -> int:
    """Returns what an evaluation counts: itself, its requests, and servers of the widest one."""
    num_servers = [
        len(request.servers)
        for _, wanted in asked
        for requests in wanted.values()
        for request in requests
    ]
    if not num_servers:
        return 0
    wide = max(0, max(num_servers) - budget.FEW_SERVERS)
    return budget.EVALUATION + len(num_servers) + budget.SERVER * wide


class Work:
    """Counts what ``orders`` evaluates, in requests."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.num_requests = 0

        def counted(asked: Sequence[Question]) -> list[Found]:
            self.num_requests += counted_work(asked)
            return questions.evaluate(asked)

        patch.setattr(orders, "evaluate", counted)


LENGTHS = st.lists(
    st.sampled_from([100, 700, 2000, 6000, 8192, 30_000, 131_072]), min_size=8, max_size=64
)


def work_of(shards: PlacedShards, num_orders: int) -> tuple[Candidate, int]:
    """Returns the result of some orders, and the requests that were evaluated for it."""
    with pytest.MonkeyPatch.context() as patch:
        work = Work(patch)
        search = search_of(shards)
        return search.run(SEARCH_ORDERS[:num_orders], int(shards.load.sum())), work.num_requests


@settings(max_examples=30, deadline=None)
@given(
    lengths=LENGTHS,
    ranks=st.integers(5, 32),
    cost=st.sampled_from(COSTS),
    servers=st.sampled_from([0, 0, 2]),
    mask=st.sampled_from(["causal", "window:512"]),
)
def test_other_orders_keep_a_budget(
    lengths: list[int], ranks: int, cost: str, servers: int, mask: str
) -> None:
    options = PlanOptions(model="llama3-8b", cost=cost, servers=servers, mask=mask)
    problem = options.problem(Placement.in_order(np.array(lengths), ranks))
    shards = PlacedShards.of(problem, problem.cost.backward)
    first, least = work_of(shards, 1)
    best, work = work_of(shards, len(SEARCH_ORDERS))
    assert work <= max(least, budget.BUDGET)
    assert best.quality <= first.quality


class WorkOfSearches:
    """Counts the work of each step of each search, in the order of its steps."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.steps: dict[OrderSearch, list[int]] = {}
        self.budgets: dict[OrderSearch, Budget] = {}
        steps, searches = self.steps, list[OrderSearch]()

        def recorded(name: str) -> None:
            method = getattr(OrderSearch, name)

            def call(search: OrderSearch, *args: object) -> object:
                steps.setdefault(search, [])
                self.budgets.setdefault(search, copy(search._budget))  # at its start
                searches.append(search)
                return method(search, *args)

            patch.setattr(OrderSearch, name, call)

        def counted(asked: Sequence[Question]) -> list[Found]:
            if work := counted_work(asked):
                steps[searches[-1]].append(work)
            return questions.evaluate(asked)

        recorded("first")
        recorded("others")
        patch.setattr(orders, "evaluate", counted)


def adversarial_ranks(lengths: list[int], ranks: int, prefix: float) -> list[list[Entry]]:
    """Gives each rank some documents; with a prefix, each continues the one before, or some do."""
    documents: list[Entry] = list(lengths)
    for number in range(1, len(lengths)):
        if prefix and number % 5:
            shared = max(int(prefix * min(lengths[number - 1 : number + 1])), 1)
            before = documents[number - 1]
            if not isinstance(before, int):  # a prefix may not be longer than all of the parent
                shared = min(shared, before["prefix"] + before["length"])
            documents[number] = {
                "length": lengths[number],
                "parent": number - 1,
                "prefix": shared,
            }
    ends = [len(documents) * rank // ranks for rank in range(ranks + 1)]
    return [documents[a:b] for a, b in pairwise(ends)]


HARD = [8192, 300, 300, 2000, 8192, 8192, 700, 100, 6000, 1500, 30_000, 450] * 6


@settings(max_examples=25, deadline=None)
@given(
    lengths=LENGTHS,
    ranks=st.integers(2, 64) | st.sampled_from([96, 192]),
    cost=st.sampled_from(COSTS),
    servers=st.sampled_from([0, 0, 2]),
    mask=st.sampled_from(["causal", "window:512", "window:4096"]),
    prefix=st.sampled_from([None, 0.0, 0.5, 0.9]),
    slow=st.sampled_from([None, 0.25]),
    placement=st.sampled_from(["given", "balanced"]),
)
@example(HARD, 32, "h200", 2, "window:512", 0.9, None, "balanced")
@example(HARD, 64, "h200", 0, "causal", None, None, "given")
@example(HARD, 24, "pairs", 0, "causal", 0.0, 0.25, "balanced")
@example([131_072] * 4, 128, "analytic", 0, "causal", None, None, "given")  # ranks get stuck
def test_every_search_keeps_its_budget(
    lengths: list[int],
    ranks: int,
    cost: str,
    servers: int,
    mask: str,
    prefix: float | None,  # None: documents span ranks
    slow: float | None,
    placement: str,
) -> None:
    if prefix is None:
        given = Placement.in_order(np.array(lengths), ranks)
    else:
        given = Placement.from_ranks(adversarial_ranks(lengths, ranks, prefix))
    speed = None if slow is None else [slow if rank % 3 else 1.0 for rank in range(ranks + servers)]
    with pytest.MonkeyPatch.context() as patch:
        work = WorkOfSearches(patch)
        place_and_plan(
            given,
            policy_of("distca", placement),
            model="llama3-8b",
            cost=cost,
            mask=mask,
            servers=servers,
            workers_serve=True,
            speed=speed,
        )
    assert len(work.steps) <= 4  # three placements, and the other direction
    for search, steps in work.steps.items():
        left = work.budgets[search]
        assert sum(steps[:-1]) < left.left  # no step begins once it is spent
        assert len(steps) <= left.steps_left
        if ranks > budget.MANY_RANKS and len(steps) > 1:  # or would be exceeded by too much
            assert left.left - sum(steps[:-1]) > budget.LEFT_FOR_A_STEP * steps[-2]


def test_more_ranks_have_more_to_search_only_where_each_has_many_tiles() -> None:
    few, many = (
        [
            Budget.of(placed([[tokens]] * ranks, "pairs").problem)
            for ranks in (budget.MANY_RANKS, 4 * budget.MANY_RANKS)
        ]
        for tokens in (1024, 65536)
    )
    assert [one.left for one in few] == [budget.BUDGET // 2] * 2
    assert [one.left for one in many] == [budget.BUDGET, budget.BUDGET_OF_MANY]
    assert [one.steps_left for one in few] == [UNLIMITED, budget.NUM_STEPS]


@pytest.mark.parametrize(("taken", "less"), [(0, 0), (10, 10), (100_000, 355)])
def test_what_a_placer_takes_leaves_many_ranks_less_to_search(taken: int, less: int) -> None:
    few, many = (placed([[65536]] * ranks, "pairs").problem for ranks in (64, 65))
    assert Budget.of(few, taken).left == budget.BUDGET
    assert Budget.of(many, taken).left == budget.BUDGET_OF_MANY - less


def test_documents_that_share_prefixes_leave_many_ranks_less_to_search() -> None:
    child = {"length": 65536, "parent": 0, "prefix": 128}
    few, many = (placed([[65536], *[[child]] * (ranks - 1)], "pairs").problem for ranks in (64, 65))
    assert Budget.of(few).left == budget.BUDGET
    assert Budget.of(many).left == budget.BUDGET_WITH_PREFIXES


@pytest.mark.parametrize(("documents", "has_fallback"), [(4, True), (96, False)])
def test_a_placer_with_a_fallback_takes_the_time_of_one_more_search(
    documents: int, has_fallback: bool
) -> None:
    lengths = np.full(documents, 96 * 8192 // documents)
    options = PlanOptions(model="llama3-8b")
    result = place_to_plan(Placement.in_order(lengths, 96), options, "balanced")
    assert (result.taken >= budget.OF_A_FALLBACK) == has_fallback


def test_a_step_needs_half_of_what_the_last_one_took_only_on_many_ranks() -> None:
    for ranks, is_spent in ((64, False), (65, True)):
        left = Budget.of(placed([[65536]] * ranks, "pairs").problem)
        left.spend(left.left * 3 // 5)
        assert not left.is_spent
        left.spend(left.left * 3 // 4)
        assert left.left > 0
        assert left.is_spent == is_spent


@pytest.mark.parametrize("cost", ["pairs", "h200"])  # one set of tasks, or one for each direction
def test_both_directions_search_less_for_the_slices_that_were_dealt(cost: str) -> None:
    lengths = distribution("prolong", 8192).batch(96 * 8192, seed=1)
    options = PlanOptions(model="llama3-8b", cost=cost)
    result = place_to_plan(Placement.in_order(lengths, 96), options, "balanced")
    assert result.begun is None  # so that both are scheduled below
    cuts = len(result.placement.document) - result.placement.num_documents
    assert budget.SLICES_A_REQUEST * result.taken > cuts > 0
    with pytest.MonkeyPatch.context() as patch:
        work = WorkOfSearches(patch)
        plan(result, options)
    expected = Budget.of(options.problem(result.placement), result.taken).left
    assert len(work.budgets) >= 1
    assert {one.left for one in work.budgets.values()} == {expected}
    assert expected < budget.BUDGET_OF_MANY


class Count:
    """Counts how often cuts are evaluated."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.evaluations, evaluate = 0, questions.evaluate_requests

        def counted(*args: object) -> object:
            self.evaluations += 1
            return evaluate(*args)  # type: ignore[arg-type]

        patch.setattr(questions, "evaluate_requests", counted)


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("placement", ["given", "balanced"])
def test_few_ranks_take_few_evaluations(
    placement: str, cost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for lengths in FILES:
        with monkeypatch.context() as patch:
            count = Count(patch)
            given = Placement.in_order(np.array(lengths), 4)
            place_and_plan(given, policy_of("distca", placement), model="llama3-8b", cost=cost)
        assert count.evaluations <= 10 * 4


@pytest.mark.parametrize("cost", COSTS)
def test_steps_with_ping_pong_take_few_evaluations(
    cost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With eight orders one by one, these steps took up to 117 evaluations."""
    planner = StepPlanner(
        MeshShape(dp=4),
        (Mask.parse("causal"),),
        PlanOptions(model="llama3-8b", cost=cost),
        policy=policy_of("distca", "balanced"),
        ping_pong=True,
    )
    for lengths in FILES:
        with monkeypatch.context() as patch:
            count = Count(patch)
            planner.plan(np.array(lengths))
        assert count.evaluations <= 10 * 4


@pytest.mark.parametrize("mask", ["causal", "window:512"])
def test_ranks_share_dedicated_servers(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank for each server at a time took 34 and 28 evaluations, and then single moves.

    Shards of one document come one after the other only if they share keys.
    """
    documents = [64 * 1024] * (48 if mask == "causal" else 12)
    count = Count(monkeypatch)
    found = plan(
        Placement.in_order(np.array(documents), 48),
        model="llama3-8b",
        cost="h200",
        servers=2,
        workers_serve=True,
        mask=mask,
    )
    assert found.imbalance <= 1.02
    assert count.evaluations <= 2 * 10


def test_ranks_that_share_a_server_keep_within_its_memory() -> None:
    """Each piece alone fits into the memory of the server, and all of them together do not."""
    batch, shape = Placement.in_order(np.array([16 * 1024] * 16), 16), model_shape("llama3-8b")
    own = int(batch.tokens.max()) * shape.token_bytes  # the least that workers need

    def used_by_server(limit: int | None) -> int:
        options = PlanOptions(
            model=shape, cost="pairs", servers=1, workers_serve=True, memory_bytes=limit
        )
        used = memory_bytes(plan(batch, options).backward, batch, shape, num_ranks=17)
        return int(used[-1])

    assert 0 < used_by_server(own) <= own < used_by_server(None)
