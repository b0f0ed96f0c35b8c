"""Step 5 of the scheduler: single moves of tasks, where step 4 has left a surplus.

If the mean load is only a few tiles, the pieces that the scheduler looks for do not exist; and its
search may have used up its budget. Then tasks move one at a time, whole or cut at one end, from the
slowest rank to the rank that finishes first, or to a faster one that finishes later. Of all such
moves, the one after which the later of the two ranks finishes earliest is made; of those that keep
both within the bound, the one with the fewest bytes. If none helps, because no piece is as small as
the headroom of any rank, a rank makes room for one: it passes tasks on to other ranks, or gives one
to the slowest rank in exchange. Every step lowers the finishing time of the slowest rank, or ends
the search.

Among hundreds of ranks, the slowest few move a task at the same time, each to other ranks.
"""

import bisect

import numpy as np

from distca.planning.costs.base import TaskCost
from distca.planning.devices import UNLIMITED
from distca.planning.problem import DocumentLoads, Problem
from distca.planning.schedulers.budget import MANY_RANKS
from distca.planning.schedulers.single_moves import (
    Move,
    Pieces,
    best_moves,
    fits,
    moved_bytes,
    pieces_of,
    rows_after,
)
from distca.planning.spans import Ints
from distca.planning.tasks import Tasks

NUM_MOVES = 512  # after which the search ends
RANKS_A_MOVE = 16  # of more than MANY_RANKS, of which one moves a task at the same time as others
NUM_BACK = 512  # longest tasks of other ranks, of which the slowest may get one in exchange
NUM_ROOMS = 16  # largest headrooms, of ranks that make room or that tasks are passed on to


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
            moves = _next_moves(problem, documents, rows, load)
            if not moves:
                break
            moves_left -= len(moves)
            for move in moves:
                load[rows[3, move.row]] -= move.freed_load
                load[move.server] += move.added_load
            rows = rows_after(rows, moves)
        # Pieces of a task that are neighbours again become one, which changes loads and their mean.
        tasks = Tasks.build(placement, problem.reach, rows)


def _next_moves(problem: Problem, documents: DocumentLoads, rows: Ints, load: Ints) -> list[Move]:
    """Returns the moves of the slowest ranks; none if the slowest one of all has none."""
    devices = problem.devices
    finish = devices.finish_ps(load)
    latest = np.floor((1.0 + problem.tolerance) * devices.mean_ps(int(load.sum())))
    at_once = devices.num_ranks // RANKS_A_MOVE if devices.num_ranks > MANY_RANKS else 1
    slowest = np.argsort(-finish, kind="stable")[:at_once]
    slowest = np.append(slowest[:1], slowest[1:][finish[slowest[1:]] > latest])
    pieces = pieces_of(problem, documents, rows, slowest)
    moves = best_moves(problem, pieces, slowest, rows, load, latest)
    if 0 in moves:
        return [moves[number] for number in sorted(moves)]
    worst = int(slowest[0])
    capacity = devices.capacity(int(load.sum()), problem.tolerance)
    serving = devices.serving[devices.serving != worst]
    roomy = serving[np.argsort((load - capacity)[serving], kind="stable")[:NUM_ROOMS]]
    step = problem, documents, worst, pieces.of_slowest(), rows, load
    return _make_room(*step, capacity, roomy) or _exchange(*step, roomy, latest)


def _make_room(
    problem: Problem,
    documents: DocumentLoads,
    worst: int,
    pieces: Pieces,
    rows: Ints,
    load: Ints,
    capacity: Ints,
    roomy: Ints,
) -> list[Move]:
    """Returns the move of a piece, and those of tasks that leave its server to make room for it.

    The piece is the lightest one after which the slowest rank is within the bound, or of all. All
    other ranks are within it.

    worst: the slowest rank, and ``pieces`` those that could leave it.
    roomy: the ranks with the largest headrooms, these first.
    """
    headroom, largest = capacity - load, roomy.tolist()
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
            moves.append(Move(task, low, high, other, added_load=moving, freed_load=moving))
        if moves and all(fits(problem, rows, move) for move in moves):
            return moves
    return []


def _exchange(
    problem: Problem,
    documents: DocumentLoads,
    worst: int,
    pieces: Pieces,
    rows: Ints,
    load: Ints,
    roomy: Ints,
    latest: float,
) -> list[Move]:
    """Returns the moves of a piece of the slowest rank, and of a task that it gets for it.

    Of all pairs, it is the one after which the later of the two ranks finishes earliest; of those
    that keep both within the bound, the one with the fewest bytes.
    """
    devices = problem.devices
    row = np.flatnonzero(np.isin(rows[3], roomy))
    row = row[np.argsort(rows[1, row] - rows[2, row], kind="stable")[:NUM_BACK]]
    if not len(row) or not len(pieces.row):
        return []
    shard, start, stop, server = rows[:, row]
    document = problem.placement.document[shard]
    back = documents.load(document, start, stop)
    added, freed = pieces.added_load[:, None], pieces.freed_load[:, None]
    later = np.maximum(
        devices.finish_ps(load[worst] - freed + back, worst),
        devices.finish_ps(load[server] + added - back, server),
    )
    until = np.maximum(later, latest)
    home = problem.placement.worker
    leaving = moved_bytes(problem, pieces.document, pieces.low, pieces.high)[:, None]
    moved = leaving * _more_away(home[rows[0, pieces.row]][:, None], worst, server)
    moved += moved_bytes(problem, document, start, stop) * _more_away(home[shard], server, worst)
    cheapest = np.where(until == until.min(), moved, UNLIMITED).argmin()
    piece, task = divmod(int(cheapest), len(row))
    if later[piece, task] >= devices.finish_ps(load)[worst]:
        return []
    returning, low, high, moving = (int(one[task]) for one in (row, start, stop, back))
    moves = [
        pieces.move(piece, int(server[task])),
        Move(returning, low, high, worst, added_load=moving, freed_load=moving),
    ]
    return moves if all(fits(problem, rows, move) for move in moves) else []


def _more_away(home: Ints, before: Ints | int, after: Ints | int) -> Ints:
    """Returns 1 for moves away from home, -1 for those back home, and 0 for all others."""
    more: Ints = np.not_equal(after, home).astype(np.int64) - np.not_equal(before, home)
    return more


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
