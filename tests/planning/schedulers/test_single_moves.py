"""The best single moves of several slow ranks, compared with a loop over all that they could do."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from strategies import COSTS, MASKS

from distca.planning.options import PlanOptions
from distca.planning.placement import Placement
from distca.planning.problem import Problem
from distca.planning.schedulers import single_moves
from distca.planning.schedulers.single_moves import Move, Pieces, best_moves, fits, pieces_of
from distca.planning.spans import Ints
from distca.planning.tasks import Tasks

MODEL = "llama3-8b"


@given(
    lengths=st.lists(st.integers(1, 1500), min_size=1, max_size=12),
    ranks=st.integers(2, 8),
    num_slow=st.integers(1, 4),
    speeds=st.lists(st.sampled_from([1.0, 0.5, 0.25]), min_size=8, max_size=8),
    memory_mib=st.sampled_from([None, 30, 60]),
    cost=st.sampled_from(COSTS),
    mask=st.sampled_from(MASKS),
    tolerance=st.sampled_from([0.02, 0.5]),
)
def test_the_best_moves_of_several_ranks_are_those_of_each(
    lengths: list[int],
    ranks: int,
    num_slow: int,
    speeds: list[float],
    memory_mib: int | None,
    cost: str,
    mask: str,
    tolerance: float,
) -> None:
    problem = PlanOptions(
        model=MODEL,
        cost=cost,
        mask=mask,
        speed=speeds[:ranks],
        tolerance=tolerance,
        memory_bytes=None if memory_mib is None else memory_mib << 20,
    ).problem(Placement.in_order(np.array(lengths), ranks))
    placement, devices = problem.placement, problem.devices
    tasks = Tasks.at_home(placement, problem.reach)
    shard = placement.shard_of(tasks.document, tasks.q_start)
    rows = np.stack([shard, tasks.q_start, tasks.q_stop, tasks.server])
    load = tasks.load_ps(placement, problem.reach, problem.cost.backward, ranks)
    slowest = np.argsort(-devices.finish_ps(load), kind="stable")[:num_slow]
    latest = np.floor((1.0 + tolerance) * devices.mean_ps(int(load.sum())))
    pieces = pieces_of(problem, problem.document_loads(problem.cost.backward.ps), rows, slowest)

    servers = single_moves._servers(devices, devices.finish_ps(load), slowest)
    expected = {
        number: move
        for number, own in enumerate(servers)
        if (move := _slowly(problem, pieces, int(slowest[number]), number, own, rows, load, latest))
    }
    assert best_moves(problem, pieces, slowest, rows, load, latest) == expected


def _slowly(
    problem: Problem,
    pieces: Pieces,
    rank: int,
    number: int,
    servers: list[int],
    rows: Ints,
    load: Ints,
    latest: float,
) -> Move | None:
    """Returns the best move of one rank, by a look at each piece on each server."""
    devices, options = problem.devices, []
    before = int(devices.finish_ps(load)[rank])
    for server in servers:
        for piece in np.flatnonzero(pieces.leaves == number).tolist():
            move = pieces.move(piece, server)
            later = max(
                int(devices.finish_ps(load[rank] - move.freed_load, rank)),
                int(devices.finish_ps(load[server] + move.added_load, server)),
            )
            if later < before and fits(problem, rows, move):
                span = np.array(move.low), np.array(move.high)
                moved = single_moves.moved_bytes(problem, pieces.document[piece], *span)
                options.append((max(later, latest), int(moved), len(options), move))
    return min(options)[-1] if options else None


def test_many_slow_ranks_share_the_cuts_that_are_looked_at() -> None:
    start, stop = np.zeros(64, np.int64), np.full(64, 1 << 20)
    grain = PlanOptions(model=MODEL).problem(Placement.in_order(stop, 64)).grain
    one, _ = single_moves._possible_cuts(grain, start[:1], stop[:1], np.zeros(1, np.int64))
    many, cut = single_moves._possible_cuts(grain, start, stop, np.arange(64))
    assert single_moves.NUM_CUTS / 2 < len(one) <= single_moves.NUM_CUTS
    assert single_moves.ALL_CUTS / 2 < len(many) <= single_moves.ALL_CUTS
    assert set(np.bincount(many)) == {len(many) // 64}
    assert np.all(cut % grain.spacing == 0)


@given(
    tasks=st.lists(st.tuples(st.integers(0, 500), st.integers(1, 300)), min_size=1, max_size=6),
    data=st.data(),
)
def test_what_does_not_move_stays_in_its_row(
    tasks: list[tuple[int, int]], data: st.DataObject
) -> None:
    rows = np.array(
        [[shard, start, start + size, 7] for shard, (start, size) in enumerate(tasks)]
    ).T
    moved = data.draw(st.lists(st.integers(0, len(tasks) - 1), unique=True, min_size=1))
    moves = []
    for row in moved:
        start, stop = rows[1:3, row].tolist()
        low = data.draw(st.integers(start, stop - 1))
        moves.append(Move(row, low, data.draw(st.integers(low + 1, stop)), row, 0, 0))
    after = single_moves.rows_after(rows, moves)

    def servers(rows: Ints) -> list[tuple[int, int, int]]:
        """Returns the server of each query."""
        return sorted(
            (shard, query, server)
            for shard, start, stop, server in rows.T.tolist()
            for query in range(start, stop)
        )

    goes = {
        (move.row, query): move.server for move in moves for query in range(move.low, move.high)
    }
    expected = [(shard, query, goes.get((shard, query), 7)) for shard, query, _ in servers(rows)]
    assert servers(after) == expected
    assert np.all(after[1] < after[2])
    assert after[0, : len(tasks)].tolist() == list(range(len(tasks)))
    unmoved = np.setdiff1d(np.arange(len(tasks)), moved)
    np.testing.assert_array_equal(after[:, unmoved], rows[:, unmoved])
