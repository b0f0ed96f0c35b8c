"""Step 5 of the scheduler: single moves of tasks, where step 4 has left a surplus.

If the mean load is only a few tiles, the pieces that the scheduler looks for do not exist; and its
search may have used up its budget. Then tasks move one at a time, whole or cut at one end, from the
slowest rank to the rank that finishes first, or to a faster one that finishes later. Of all such
moves, the one after which the later of the two ranks finishes earliest is made; of those that keep
both within the bound, the one with the fewest bytes. If none helps, because no piece is as small as
the headroom of any rank, a rank makes room for one: it passes a task on to another rank. Every move
lowers the finishing time of the slowest rank, or ends the search.
"""

import bisect
from typing import NamedTuple

import numpy as np

from distca.planning.costs.base import TaskCost
from distca.planning.devices import UNLIMITED, Devices
from distca.planning.problem import DocumentLoads, Grain, Problem
from distca.planning.spans import Ints, as_ints, expand
from distca.planning.tasks import Tasks
from distca.planning.traffic import memory_bytes

NUM_MOVES = 512  # after which the search ends
NUM_TASKS = 256  # longest tasks of the slowest rank, and best moves, that are looked at
NUM_CUTS = 1024  # of these tasks that are looked at; if there are more, every second or third, ...
NUM_ROOMS = 16  # largest headrooms of ranks that make room, or that tasks are passed on to


class _Move(NamedTuple):
    """Queries [low, high) of the task in one row go to another server."""

    row: int
    low: int
    high: int
    server: int
    added_load: int  # of the server
    freed_load: int  # of the rank that they leave: cuts make this less than what the server gets


def repair(problem: Problem, cost: TaskCost, tasks: Tasks) -> tuple[Tasks, float]:
    """Returns tasks with a lower imbalance, if single moves can lower it, and the imbalance."""
    devices, placement = problem.devices, problem.placement
    documents = problem.document_loads(cost.ps)
    moves_left, best = NUM_MOVES, (tasks, np.inf)
    while True:
        load = tasks.load_ps(placement, problem.reach, cost, devices.num_ranks)
        imbalance = devices.imbalance(load)
        if imbalance >= best[1]:
            return best
        best = tasks, imbalance
        shard = placement.shard_of(tasks.document, tasks.q_start)
        rows = np.stack([shard, tasks.q_start, tasks.q_stop, tasks.server])  # as in ``Tasks.build``
        while moves_left > 0 and devices.imbalance(load) > 1.0 + problem.tolerance:
            finish = devices.finish_ps(load)
            pieces = _pieces(problem, documents, rows, int(finish.argmax()))
            moves = _best_move(problem, pieces, rows, load, finish)
            moves = moves or _moves_that_make_room(problem, documents, pieces, rows, load)
            if not moves:
                break
            moves_left -= len(moves)
            for move in sorted(moves, reverse=True):  # the rows before one stay where they are
                load[rows[3, move.row]] -= move.freed_load
                load[move.server] += move.added_load
                rows = _rows_after(rows, move)
        # Pieces of a task that are neighbours again become one, which changes loads and their mean.
        tasks = Tasks.build(placement, problem.reach, rows)


class _Pieces(NamedTuple):
    """What could leave a rank: whole tasks, and heads and tails at every possible cut."""

    rank: int
    row: Ints  # [pieces], as all the others
    document: Ints
    low: Ints
    high: Ints
    added_load: Ints
    freed_load: Ints

    def move(self, piece: int, server: int) -> _Move:
        """Returns the move of one of them."""
        columns = (self.row, self.low, self.high, self.added_load, self.freed_load)
        row, low, high, added, freed = (int(column[piece]) for column in columns)
        return _Move(row, low, high, server, added, freed)


def _pieces(problem: Problem, documents: DocumentLoads, rows: Ints, rank: int) -> _Pieces:
    mine = np.flatnonzero(rows[3] == rank)
    mine = mine[np.argsort(rows[1, mine] - rows[2, mine], kind="stable")[:NUM_TASKS]]
    start, stop, document = rows[1, mine], rows[2, mine], problem.placement.document[rows[0, mine]]
    cut_task, cut = _possible_cuts(problem.grain, start, stop)
    task = np.concatenate([np.arange(len(mine)), cut_task, cut_task])
    low = np.concatenate([start, start[cut_task], cut])
    high = np.concatenate([stop, cut, stop[cut_task]])
    load = documents.load(document[task], low, high)
    first_tail = len(mine) + len(cut)
    whole, head, tail = load[: len(mine)], load[len(mine) : first_tail], load[first_tail:]
    freed = whole[task] - np.concatenate([np.zeros_like(whole), tail, head])
    return _Pieces(rank, mine[task], document[task], low, high, load, freed)


def _best_move(
    problem: Problem, pieces: _Pieces, rows: Ints, load: Ints, finish: Ints
) -> list[_Move]:
    """Returns the move after which the later of the two ranks is earliest, or none if none helps.

    Of those that are within the bound, it is the one with the fewest bytes.
    """
    devices, worst = problem.devices, pieces.rank
    servers, num_pieces = _servers(devices, finish), len(pieces.row)
    taken = [devices.finish_ps(load[server] + pieces.added_load, server) for server in servers]
    later = np.maximum(devices.finish_ps(load[worst] - pieces.freed_load, worst), taken).ravel()
    latest = np.floor((1.0 + problem.tolerance) * devices.mean_ps(int(load.sum())))
    helps = np.flatnonzero(later < finish[worst])
    for _ in range(NUM_TASKS):
        if not len(helps):
            break
        until = np.maximum(later[helps], latest)
        best = np.flatnonzero(until == until.min())
        of = helps[best] % num_pieces
        num_bytes = _moved_bytes(problem, pieces.document[of], pieces.low[of], pieces.high[of])
        index = int(best[num_bytes.argmin()])
        server, piece = divmod(int(helps[index]), num_pieces)
        move = pieces.move(piece, servers[server])
        if _fits(problem, rows, move):
            return [move]
        helps = np.delete(helps, index)
    return []


def _moves_that_make_room(
    problem: Problem, documents: DocumentLoads, pieces: _Pieces, rows: Ints, load: Ints
) -> list[_Move]:
    """Returns the move of a piece, and those of tasks that leave its server to make room for it.

    The piece is the lightest one after which the slowest rank is within the bound, or of all. All
    other ranks are within it.
    """
    devices, worst = problem.devices, pieces.rank
    capacity = devices.capacity(int(load.sum()), problem.tolerance)
    headroom, serving = capacity - load, devices.serving[devices.serving != worst]
    largest = serving[np.argsort(-headroom[serving], kind="stable")[:NUM_ROOMS]].tolist()
    stays_above = load[worst] - pieces.freed_load > capacity[worst]
    useful = np.flatnonzero(pieces.freed_load > 0)
    if not len(useful):
        return []
    piece = int(useful[np.lexsort((pieces.added_load[useful], stays_above[useful]))[0]])
    for server in largest:
        row = np.flatnonzero(rows[3] == server)
        task_load = documents.load(problem.placement.document[rows[0, row]], *rows[1:3, row])
        rooms = [(int(headroom[other]), other) for other in largest if other != server]
        passed_on = _pass_on(
            sorted(zip(task_load.tolist(), row.tolist(), strict=True)),
            int(pieces.added_load[piece] - headroom[server]),
            rooms,
        )
        moves = [pieces.move(piece, server)] if passed_on else []
        for moving, task, other in passed_on:
            low, high = rows[1:3, task].tolist()
            moves.append(_Move(task, low, high, other, added_load=moving, freed_load=moving))
        if moves and all(_fits(problem, rows, move) for move in moves):
            return moves
    return []


def _pass_on(
    tasks: list[tuple[int, int]], load: int, rooms: list[tuple[int, int]]
) -> list[tuple[int, int, int]]:
    """Returns (load, row, server) of tasks that have a load together; none if there are too few.

    tasks: (load, row), the lightest first.
    rooms: (headroom, server), the largest first. Each takes one task.
    """
    chosen = []
    for headroom, server in rooms:
        last = bisect.bisect_left(tasks, (headroom + 1, -1))
        if not last:
            return []
        enough = bisect.bisect_left(tasks, (load, -1), hi=last)
        moving, row = tasks.pop(min(enough, last - 1))
        chosen.append((moving, row, server))
        load -= moving
        if load <= 0:
            return chosen
    return []


def _servers(devices: Devices, finish: Ints) -> list[int]:
    """Returns the rank that finishes first, and those that are faster than all that finish before.

    With more to do, no other rank would finish before all of these.
    """
    serving = devices.serving
    order = serving[np.lexsort((-devices.speed[serving], finish[serving]))]
    speed = devices.speed[order]
    is_faster = speed[1:] > np.maximum.accumulate(speed)[:-1]
    servers: list[int] = order[np.append(True, is_faster)].tolist()
    return servers


def _possible_cuts(grain: Grain, start: Ints, stop: Ints) -> tuple[Ints, Ints]:
    """Returns (task, position) of cuts that leave at least ``min_shard`` on both sides."""
    first, last = grain.first_cut(start), grain.last_cut(stop)
    every = 1 + int(np.maximum(last - first + 1, 0).sum()) // NUM_CUTS
    first, last = -(-first // every), last // every
    count = np.maximum(last - first + 1, 0)
    cut = expand(first, count) * (every * grain.spacing)
    return np.repeat(np.arange(len(start)), count), cut


def _moved_bytes(problem: Problem, document: Ints, low: Ints, high: Ints) -> Ints:
    """Returns what queries [low, high) move, if their server has none of their keys."""
    num_keys = problem.masks.num_keys(document, low, high)
    return problem.shape.qo_bytes * (high - low) + problem.shape.kv_bytes * num_keys


def _rows_after(rows: Ints, move: _Move) -> Ints:
    """Returns the rows with those that replace the one of a move at the end."""
    shard, start, stop, server = rows[:, move.row].tolist()
    pieces = (
        (shard, start, move.low, server),
        (shard, move.low, move.high, move.server),
        (shard, move.high, stop, server),
    )
    added = as_ints([piece for piece in pieces if piece[1] < piece[2]]).T
    return np.concatenate([rows[:, : move.row], rows[:, move.row + 1 :], added], axis=1)


def _fits(problem: Problem, rows: Ints, move: _Move) -> bool:
    """Returns whether the server of a move has the memory for it."""
    limit = problem.devices.memory_bytes[move.server]
    if limit == UNLIMITED:
        return True
    tasks = Tasks.build(problem.placement, problem.reach, _rows_after(rows, move))
    used = memory_bytes(tasks, problem.placement, problem.shape, problem.devices.num_ranks)
    return bool(used[move.server] <= limit)
