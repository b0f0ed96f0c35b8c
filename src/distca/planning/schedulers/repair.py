"""Step 5 of the scheduler: single moves of tasks, where step 4 has left a surplus.

If the mean load is only a few tiles, the pieces that the scheduler looks for do not exist; and its
search may have used up its budget. Then tasks move one at a time, whole or cut at one end, from the
slowest rank to the rank that finishes first, or to a faster one that finishes later. Of all such
moves, the one after which the later of the two ranks finishes earliest is made; of those that keep
both within the bound, the one with the fewest bytes. Every move lowers the finishing time of the
slowest rank, or ends the search.
"""

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
        while moves_left and devices.imbalance(load) > 1.0 + problem.tolerance:
            move = _best_move(problem, documents, rows, load)
            if move is None:
                break
            moves_left -= 1
            load[rows[3, move.row]] -= move.freed_load
            load[move.server] += move.added_load
            rows = _rows_after(rows, move)
        # Pieces of a task that are neighbours again become one, which changes loads and their mean.
        tasks = Tasks.build(placement, problem.reach, rows)


def _best_move(problem: Problem, documents: DocumentLoads, rows: Ints, load: Ints) -> _Move | None:
    """Returns the best move, or None if no move helps."""
    devices = problem.devices
    finish = devices.finish_ps(load)
    worst, servers = int(np.argmax(finish)), _servers(devices, finish)
    mine = np.flatnonzero(rows[3] == worst)
    mine = mine[np.argsort(rows[1, mine] - rows[2, mine], kind="stable")[:NUM_TASKS]]

    # 1. Every piece that could move: whole tasks, and heads and tails at every possible cut.
    start, stop, document = rows[1, mine], rows[2, mine], problem.placement.document[rows[0, mine]]
    cut_task, cut = _possible_cuts(problem.grain, start, stop)
    task = np.concatenate([np.arange(len(mine)), cut_task, cut_task])
    document = document[task]
    low = np.concatenate([start, start[cut_task], cut])
    high = np.concatenate([stop, cut, stop[cut_task]])
    moving = documents.load(document, low, high)
    first_tail = len(mine) + len(cut)
    whole, head, tail = moving[: len(mine)], moving[len(mine) : first_tail], moving[first_tail:]
    freed = whole[task] - np.concatenate([np.zeros_like(whole), tail, head])

    # 2. The move after which the later of the two ranks is earliest. Of those that are within the
    #    bound, the one with the fewest bytes.
    taken = [devices.finish_ps(load[server] + moving, server) for server in servers]
    later = np.maximum(devices.finish_ps(load[worst] - freed, worst), taken).ravel()
    latest = np.floor((1.0 + problem.tolerance) * devices.mean_ps(int(load.sum())))
    helps = np.flatnonzero(later < finish[worst])
    for _ in range(NUM_TASKS):
        if not len(helps):
            break
        until = np.maximum(later[helps], latest)
        best = np.flatnonzero(until == until.min())
        of = helps[best] % len(moving)
        index = int(best[_moved_bytes(problem, document[of], low[of], high[of]).argmin()])
        server, piece = divmod(int(helps[index]), len(moving))
        move = _Move(
            row=int(mine[task[piece]]),
            low=int(low[piece]),
            high=int(high[piece]),
            server=servers[server],
            added_load=int(moving[piece]),
            freed_load=int(freed[piece]),
        )
        if _fits(problem, rows, move):
            return move
        helps = np.delete(helps, index)
    return None


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
