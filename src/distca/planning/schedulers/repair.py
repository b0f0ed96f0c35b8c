"""Step 5 of the scheduler: single moves of tasks, where step 4 has left a surplus.

If the mean load is only a few tiles, the pieces that the scheduler looks for do not exist; and its
search may have used up its budget. Then tasks move one at a time, whole or cut at one end, from the
slowest rank to the rank that finishes first, or to a faster one that finishes later. Of all such
moves, the one after which the later of the two ranks finishes earliest is made; of those that keep
both within the bound, the one with the fewest bytes. If none helps, several tasks move at once
(``stuck_rank``). Every step lowers the finishing time of the slowest rank, or ends the search.

Among hundreds of ranks, the slowest few move a task at the same time, each to other ranks.
"""

import numpy as np

from distca.planning.costs.base import TaskCost
from distca.planning.problem import DocumentLoads, Problem
from distca.planning.schedulers.budget import MANY_RANKS
from distca.planning.schedulers.single_moves import Move, best_moves, pieces_of, rows_after
from distca.planning.schedulers.stuck_rank import StuckRank
from distca.planning.spans import Ints, as_ints
from distca.planning.tasks import Tasks

NUM_MOVES = 512  # after which the search ends
NUM_STEPS = 48  # of more than MANY_RANKS, likewise: many that move little take as long
RANKS_A_MOVE = 16  # of more than MANY_RANKS, of which one moves a task at the same time as others


def repair(problem: Problem, cost: TaskCost, tasks: Tasks) -> tuple[Tasks, float]:
    """Returns tasks with a lower imbalance, if single moves can lower it, and the imbalance."""
    devices, placement = problem.devices, problem.placement
    documents = problem.document_loads(cost.ps)
    moves_left, best = NUM_MOVES, (tasks, np.inf)
    steps_left = NUM_STEPS if devices.num_ranks > MANY_RANKS else NUM_MOVES
    while True:
        load = tasks.load_ps(placement, problem.reach, cost, devices.num_ranks)
        imbalance = devices.imbalance(load)
        if imbalance >= best[1]:
            return best
        best, moves_before = (tasks, imbalance), moves_left
        shard = placement.shard_of(tasks.document, tasks.q_start)
        rows = np.stack([shard, tasks.q_start, tasks.q_stop, tasks.server])  # as in ``Tasks.build``
        while min(moves_left, steps_left) > 0 and devices.imbalance(load) > 1.0 + problem.tolerance:
            moves = _next_moves(problem, documents, rows, load)
            if not moves:
                break
            moves_left, steps_left = moves_left - len(moves), steps_left - 1
            row, _, _, server, added, freed = as_ints(moves).T
            np.subtract.at(load, rows[3, row], freed)
            np.add.at(load, server, added)
            rows = rows_after(rows, moves)
        if moves_left == moves_before:
            return best
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
    return StuckRank(problem, documents, worst, pieces.of_slowest(), rows, load, latest).moves()
