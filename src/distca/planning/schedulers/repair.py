"""Step 5 of the scheduler: single moves of tasks, for batches that are small for their tiles.

If the mean load is only a few tiles, the pieces that the scheduler looks for do not exist. Then
tasks move one at a time, whole or cut at one end, from the slowest rank to the rank that finishes
first. Of all such moves, the one after which the later of the two ranks finishes earliest is made.
Every move lowers the finishing time of the slowest rank, or ends the search.
"""

from typing import NamedTuple

import numpy as np

from distca.planning.costs.base import TaskCost
from distca.planning.devices import UNLIMITED
from distca.planning.problem import DocumentLoads, Problem
from distca.planning.spans import Ints, as_ints, expand
from distca.planning.tasks import Tasks
from distca.planning.traffic import memory_bytes

NUM_MOVES = 512  # after which the search ends
NUM_TASKS = 256  # longest tasks of the slowest rank, and best moves, that are looked at


class _Move(NamedTuple):
    """Queries [low, high) of the task in one row go to another server."""

    row: int
    low: int
    high: int
    server: int


def repair(problem: Problem, cost: TaskCost, tasks: Tasks) -> tuple[Tasks, float]:
    """Returns tasks with a lower imbalance, if single moves can lower it, and the imbalance."""
    devices, placement = problem.devices, problem.placement
    documents = problem.document_loads(cost.ps)
    shard = placement.shard_of(tasks.document, tasks.q_start)
    rows = np.stack([shard, tasks.q_start, tasks.q_stop, tasks.server])  # as in ``Tasks.build``
    load = tasks.load_ps(placement, problem.reach, cost, devices.num_ranks)
    for _ in range(NUM_MOVES):
        if devices.imbalance(load) <= 1.0 + problem.tolerance:
            break
        move = _best_move(problem, documents, rows, load)
        if move is None:
            break
        pieces = _pieces_after(rows, move)
        for changed, sign in ((rows[:, [move.row]], -1), (pieces, 1)):
            np.add.at(load, changed[3], sign * _load(problem, documents, changed))
        rows = np.concatenate([np.delete(rows, move.row, axis=1), pieces], axis=1)
    tasks = Tasks.build(placement, problem.reach, rows)
    load = tasks.load_ps(placement, problem.reach, cost, devices.num_ranks)
    return tasks, devices.imbalance(load)


def _best_move(problem: Problem, documents: DocumentLoads, rows: Ints, load: Ints) -> _Move | None:
    """Returns the best move, or None if no move helps."""
    devices = problem.devices
    finish = devices.finish_ps(load)
    worst = int(np.argmax(finish))
    serving = devices.serving
    first = int(serving[np.argmin(finish[serving])])
    mine = np.flatnonzero(rows[3] == worst)
    mine = mine[np.argsort((rows[1] - rows[2])[mine], kind="stable")[:NUM_TASKS]]

    # 1. Every piece that could move: whole tasks, and heads and tails at every possible cut.
    row, low, high = _possible_pieces(problem, rows, mine)
    document, start, stop = problem.placement.document[rows[0, row]], rows[1, row], rows[2, row]
    moving = documents.load(document, low, high)
    head, tail = documents.load(document, start, low), documents.load(document, high, stop)
    whole = documents.load(document, start, stop)

    # 2. The move after which the later of the two ranks is earliest; ties: the fewest queries.
    later = np.maximum(
        devices.finish_ps(load[worst] - whole + head + tail, worst),
        devices.finish_ps(load[first] + moving, first),
    )
    for best in np.lexsort((high - low, later))[:NUM_TASKS].tolist():
        if later[best] >= finish[worst]:
            return None
        move = _Move(int(row[best]), int(low[best]), int(high[best]), first)
        if _fits(problem, rows, move):
            return move
    return None


def _possible_pieces(problem: Problem, rows: Ints, mine: Ints) -> tuple[Ints, Ints, Ints]:
    """Returns (row, start, stop) of all pieces that may move and leave at least ``min_shard``."""
    grain = problem.grain
    start, stop = rows[1, mine], rows[2, mine]
    first = grain.first_cut(start)
    count = np.maximum(grain.last_cut(stop) - first + 1, 0)
    cut = expand(first, count) * grain.spacing
    owner = np.repeat(mine, count)
    return (
        np.concatenate([mine, owner, owner]),
        np.concatenate([start, np.repeat(start, count), cut]),
        np.concatenate([stop, cut, np.repeat(stop, count)]),
    )


def _pieces_after(rows: Ints, move: _Move) -> Ints:
    """Returns the rows that replace the one of a move."""
    shard, start, stop, server = rows[:, move.row].tolist()
    pieces = (
        (shard, start, move.low, server),
        (shard, move.low, move.high, move.server),
        (shard, move.high, stop, server),
    )
    return as_ints([piece for piece in pieces if piece[1] < piece[2]]).T


def _load(problem: Problem, documents: DocumentLoads, rows: Ints) -> Ints:
    return documents.load(problem.placement.document[rows[0]], rows[1], rows[2])


def _fits(problem: Problem, rows: Ints, move: _Move) -> bool:
    """Returns whether the server of a move has the memory for it."""
    limit = problem.devices.memory_bytes[move.server]
    if limit == UNLIMITED:
        return True
    after = np.concatenate([np.delete(rows, move.row, axis=1), _pieces_after(rows, move)], axis=1)
    tasks = Tasks.build(problem.placement, problem.reach, after)
    used = memory_bytes(tasks, problem.placement, problem.shape, problem.devices.num_ranks)
    return bool(used[move.server] <= limit)
