"""Single moves, where pieces of the required size do not exist."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import COSTS, MASKS

from distca.planning.api import place_and_plan
from distca.planning.options import PlanOptions
from distca.planning.placement import Placement
from distca.planning.policies import policy_of
from distca.planning.schedulers import repair as repairs
from distca.planning.tasks import Tasks

MODEL = "llama3-8b"


@given(
    lengths=st.lists(st.integers(1, 3000), min_size=1, max_size=12),
    ranks=st.integers(2, 9),
    cost=st.sampled_from(COSTS),
    mask=st.sampled_from(MASKS),
    many_ranks=st.sampled_from([1, repairs.MANY_RANKS]),
)
def test_moves_lower_the_imbalance_or_change_nothing(
    lengths: list[int], ranks: int, cost: str, mask: str, many_ranks: int
) -> None:
    placement = Placement.in_order(np.array(lengths), ranks)
    problem = PlanOptions(model=MODEL, cost=cost, mask=mask).problem(placement)
    tasks = Tasks.at_home(placement, problem.reach)

    def imbalance(tasks: Tasks) -> float:
        load = tasks.load_ps(placement, problem.reach, problem.cost.backward, ranks)
        return problem.devices.imbalance(load)

    with patch.multiple(repairs, MANY_RANKS=many_ranks, RANKS_A_MOVE=2):
        repaired, stated = repairs.repair(problem, problem.cost.backward, tasks)
    assert stated == imbalance(repaired)
    assert stated < imbalance(tasks) or repaired is tasks
    assert int((repaired.q_stop - repaired.q_start).sum()) == sum(lengths)


def test_a_task_may_go_to_a_faster_rank_that_finishes_later() -> None:
    # The idle rank would take as long as the slow one does; the fast one takes half of that.
    placement = Placement.from_ranks([[128], [40], []])
    speed = (0.25, 1.0, 0.25)
    problem = PlanOptions(model=MODEL, cost="pairs", speed=speed).problem(placement)
    tasks = Tasks.at_home(placement, problem.reach)
    assert tasks.server.tolist() == [0, 1]
    repaired, imbalance = repairs.repair(problem, problem.cost.backward, tasks)
    assert repaired.server[0] == 1
    load = tasks.load_ps(placement, problem.reach, problem.cost.backward, 3)
    assert imbalance < problem.devices.imbalance(load)


def test_a_rank_makes_room_for_a_piece() -> None:
    # The smallest piece of the long document has 131,072 pairs, and every other rank has headroom
    # for 27,088. Seven of them take a short document each from the eighth, which takes the piece.
    placement = Placement.from_ranks([[1024], *[[128] * 60] * 8])
    problem = PlanOptions(model=MODEL, cost="pairs", mask="full").problem(placement)
    tasks = Tasks.at_home(placement, problem.reach)
    repaired, imbalance = repairs.repair(problem, problem.cost.backward, tasks)
    pairs = np.bincount(repaired.server, repaired.pairs(placement, problem.reach))
    assert sorted(pairs.tolist()) == [917_504] + [999_424] * 8
    assert 1.0 < imbalance < 1.01
    assert int((repaired.server != repaired.home).sum()) == 8


def test_tasks_are_exchanged_where_no_single_one_fits() -> None:
    # Two documents with 55 pairs each and two with 45: only with one of each are both ranks even.
    placement = Placement.from_ranks([[10, 10], [9, 9]])
    problem = PlanOptions(model=MODEL, cost="pairs").problem(placement)
    tasks = Tasks.at_home(placement, problem.reach)
    repaired, imbalance = repairs.repair(problem, problem.cost.backward, tasks)
    assert imbalance == 1.0
    assert sorted(zip(repaired.server.tolist(), repaired.queries.tolist(), strict=True)) == [
        (0, 9),
        (0, 10),
        (1, 9),
        (1, 10),
    ]


def test_tasks_are_not_exchanged_where_memory_is_short() -> None:
    placement = Placement.from_ranks([[10, 10], [9, 9]])
    options = PlanOptions(model=MODEL, cost="pairs", memory_bytes=1)
    problem = options.problem(placement)
    tasks = Tasks.at_home(placement, problem.reach)
    assert repairs.repair(problem, problem.cost.backward, tasks)[0] is tasks


def test_no_room_is_made_where_memory_or_headroom_is_short() -> None:
    for ranks, memory in ((8, None), (9, 16 << 20)):  # six others; all memory is taken
        placement = Placement.from_ranks([[1024], *[[128] * 60] * (ranks - 1)])
        options = PlanOptions(model=MODEL, cost="pairs", mask="full", memory_bytes=memory)
        problem = options.problem(placement)
        tasks = Tasks.at_home(placement, problem.reach)
        assert repairs.repair(problem, problem.cost.backward, tasks)[0] is tasks


def test_pieces_that_become_one_again_are_not_cut_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    # Merging raises the load here, so that the same moves would be made again and again.
    lengths = [797, 3977, 519, 4052, 579, 936, 16384, 7663, 5981, 1301, 16384, 3699, 1224, 950]
    placement = Placement.in_order(np.array([*lengths, 1912, 1561]), 48)
    moves, best_moves = [], repairs.best_moves

    def counted(*arguments: object) -> object:
        moves.append(best_moves(*arguments))  # type: ignore[arg-type]
        return moves[-1]

    monkeypatch.setattr(repairs, "best_moves", counted)
    policy = policy_of("distca", "balanced")
    plan = place_and_plan(placement, policy, model=MODEL, cost="h200", mask="window:512")
    assert plan.meets_bound
    assert len(moves) <= 16


@pytest.mark.parametrize("speed", [None, [1.0, 0.5] * 64])
def test_the_slowest_of_many_ranks_move_tasks_at_the_same_time(
    speed: list[float] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    placement = Placement.from_ranks([*[[2048, 1536, 1024]] * 8, *[[1024, 512]] * 120])
    options = PlanOptions(model=MODEL, cost="pairs", speed=speed, tolerance=0.05)
    problem = options.problem(placement)
    tasks = Tasks.at_home(placement, problem.reach)
    rounds, next_moves = [], repairs._next_moves

    def counted(*arguments: object) -> list[object]:
        rounds.append(next_moves(*arguments))  # type: ignore[arg-type]
        return list(rounds[-1])

    monkeypatch.setattr(repairs, "_next_moves", counted)
    repaired, imbalance = repairs.repair(problem, problem.cost.backward, tasks)
    assert imbalance <= 1.05
    assert int(repaired.queries.sum()) == int(placement.lengths.sum())
    several = [moves for moves in rounds if len(moves) > 1]
    assert max(map(len, several)) == 8  # one in 16 ranks
    for moves in several:
        assert len({move.server for move in moves}) == len(moves)
        assert len({move.row for move in moves}) == len(moves)
    num_rounds = len(rounds)
    monkeypatch.setattr(repairs, "MANY_RANKS", 128)
    _, one_by_one = repairs.repair(problem, problem.cost.backward, tasks)
    assert one_by_one <= 1.05
    assert len(rounds) - num_rounds > 3 * num_rounds


def test_the_slowest_rank_is_looked_at_wherever_rounding_puts_the_bound() -> None:
    placement = Placement.from_ranks([[256], [256]])
    problem = PlanOptions(model=MODEL, cost="pairs").problem(placement)
    rows = np.array([[0, 1], [0, 0], [256, 256], [0, 1]])
    loads = problem.document_loads(problem.cost.backward.ps)
    load = loads.load(np.arange(2), rows[1], rows[2])
    assert repairs._next_moves(problem, loads, rows, load) == []  # both finish at the mean


def test_many_ranks_end_after_some_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    placement = Placement.from_ranks([*[[2048, 1536, 1024]] * 8, *[[1024, 512]] * 120])
    problem = PlanOptions(model=MODEL, cost="pairs", tolerance=0.05).problem(placement)
    tasks = Tasks.at_home(placement, problem.reach)
    rounds, next_moves = [], repairs._next_moves

    def counted(*arguments: object) -> list[object]:
        rounds.append(next_moves(*arguments))  # type: ignore[arg-type]
        return list(rounds[-1])

    monkeypatch.setattr(repairs, "_next_moves", counted)
    results = []
    for steps in (1, 2, repairs.NUM_STEPS):
        rounds.clear()
        monkeypatch.setattr(repairs, "NUM_STEPS", steps)
        results.append(repairs.repair(problem, problem.cost.backward, tasks)[1])
        assert len(rounds) <= steps
    assert results == sorted(results, reverse=True)
    assert results[0] > results[-1]
    assert results[-1] <= 1.05
