"""Step 5 of the scheduler: single moves of tasks, for batches that are small for their tiles.

If the mean load is only a few tiles, the pieces that the scheduler looks for do not exist. Then
tasks move one at a time, whole or cut at one end, from the slowest rank to the rank that finishes
first. Of all such moves, the one after which the later of the two ranks finishes earliest is made.
Every move lowers the finishing time of the slowest rank, or ends the search.
"""

import numpy as np

from distca.planning.costs.base import TaskCost
from distca.planning.problem import DocumentLoads, Problem
from distca.planning.spans import Ints, as_ints, expand
from distca.planning.tasks import Tasks
from distca.planning.traffic import memory_bytes

MOVES_PER_RANK = 8  # after which the search ends, because each move recomputes all loads
NUM_TASKS = 256  # longest tasks of the slowest rank, and best moves, that are looked at


def repair(problem: Problem, cost: TaskCost, tasks: Tasks) -> tuple[Tasks, float]:
    """Returns tasks with a lower imbalance, if single moves can lower it, and the imbalance."""
    devices, documents = problem.devices, problem.document_loads(cost.ps)
    left = MOVES_PER_RANK * devices.num_ranks
    while True:
        load = np.zeros(devices.num_ranks, np.int64)
        np.add.at(load, tasks.server, documents.load(tasks.document, tasks.q_start, tasks.q_stop))
        imbalance = devices.imbalance(load)
        if imbalance <= 1.0 + problem.tolerance or left == 0:
            return tasks, imbalance
        moved = _best_move(problem, documents, tasks, load)
        if moved is None:
            return tasks, imbalance
        tasks, left = moved, left - 1


def _best_move(
    problem: Problem, documents: DocumentLoads, tasks: Tasks, load: Ints
) -> Tasks | None:
    """Returns the tasks after the best move, or None if no move helps."""
    devices = problem.devices
    finish = devices.finish_ps(load)
    worst = int(np.argmax(finish))
    serving = devices.serving
    first = int(serving[np.argmin(finish[serving])])
    mine = np.flatnonzero(tasks.server == worst)
    mine = mine[np.argsort(-tasks.queries[mine], kind="stable")[:NUM_TASKS]]

    # 1. Every piece that could move: whole tasks, and heads and tails at every possible cut.
    task, low, high = _pieces(problem, tasks, mine)
    document = tasks.document[task]
    moving = documents.load(document, low, high)
    head = documents.load(document, tasks.q_start[task], low)
    tail = documents.load(document, high, tasks.q_stop[task])
    whole = documents.load(document, tasks.q_start[task], tasks.q_stop[task])

    # 2. The move after which the later of the two ranks is earliest; ties: the fewest queries.
    later = np.maximum(
        devices.finish_ps(load[worst] - whole + head + tail, worst),
        devices.finish_ps(load[first] + moving, first),
    )
    for best in np.lexsort((high - low, later))[:NUM_TASKS].tolist():
        if later[best] >= finish[worst]:
            return None
        moved = _move(problem, tasks, int(task[best]), int(low[best]), int(high[best]), first)
        used = memory_bytes(moved, problem.placement, problem.shape, devices.num_ranks)
        if used[first] <= devices.memory_bytes[first]:
            return moved
    return None


def _pieces(problem: Problem, tasks: Tasks, mine: Ints) -> tuple[Ints, Ints, Ints]:
    """Returns (task, start, stop) of all pieces that may move and leave at least ``min_shard``."""
    grain = problem.grain
    start, stop = tasks.q_start[mine], tasks.q_stop[mine]
    first = grain.first_cut(start)
    count = np.maximum(grain.last_cut(stop) - first + 1, 0)
    cut = expand(first, count) * grain.spacing
    owner = np.repeat(mine, count)
    return (
        np.concatenate([mine, owner, owner]),
        np.concatenate([start, np.repeat(start, count), cut]),
        np.concatenate([stop, cut, np.repeat(stop, count)]),
    )


def _move(problem: Problem, tasks: Tasks, task: int, low: int, high: int, server: int) -> Tasks:
    """Returns the tasks with queries [low, high) of one of them on another server."""
    start, stop, home = (int(c[task]) for c in (tasks.q_start, tasks.q_stop, tasks.server))
    spans = ((start, low, home), (low, high, server), (high, stop, home))
    pieces = as_ints([span for span in spans if span[0] < span[1]]).T
    others = np.arange(len(tasks)) != task
    document = np.append(tasks.document[others], np.full(pieces.shape[1], tasks.document[task]))
    unchanged = np.stack([tasks.q_start, tasks.q_stop, tasks.server])[:, others]
    rows = np.concatenate([unchanged, pieces], axis=1)
    shard = problem.placement.shard_of(document, rows[0])
    return Tasks.build(problem.placement, problem.reach, np.stack([shard, *rows]))
