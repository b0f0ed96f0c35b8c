"""Small batches, coarse cuts: mends by single moves what the scheduler could not place.

When the mean load is only a few tiles, the pieces that the scheduler looks for do not exist. Then
one move at a time, of a whole task or of a part cut from either end, off the worst rank and onto
the rank that would finish first, whichever leaves the lower of the two peaks. Every step lowers
the peak of the pair, so that it ends.
"""

from __future__ import annotations

import numpy as np

from distca.planning.problem import Price, Problem
from distca.planning.spans import Ints, as_ints, expand
from distca.planning.tasks import Tasks
from distca.planning.traffic import memory_bytes

MOVES_PER_RANK = 8
NUM_TASKS = 256  # of the worst rank, longest first, that are looked at


def repair(problem: Problem, price: Price, tasks: Tasks) -> tuple[Tasks, float]:
    """Tasks with a lower peak, if single moves can lower it, and their imbalance."""
    servers = problem.devices
    left = MOVES_PER_RANK * servers.num_ranks
    while True:
        work = np.zeros(servers.num_ranks, np.int64)
        np.add.at(work, tasks.server, _loads(problem, price, tasks))
        imbalance = servers.imbalance(work)
        if imbalance <= 1.0 + problem.tolerance or left == 0:
            return tasks, imbalance
        moved = _best_move(problem, price, tasks, work)
        if moved is None:
            return tasks, imbalance
        tasks, left = moved, left - 1


def _best_move(problem: Problem, price: Price, tasks: Tasks, work: Ints) -> Tasks | None:
    servers, documents = problem.devices, problem.priced_documents(price)
    finish = servers.seconds_ps(work)
    worst = int(np.argmax(finish))
    serving = servers.serving
    first = int(serving[np.argmin(finish[serving])])
    mine = np.flatnonzero(tasks.server == worst)
    mine = mine[np.argsort(-tasks.queries[mine], kind="stable")[:NUM_TASKS]]

    # 1. Every piece that could go: whole tasks, then heads and tails at every cut.
    task, low, high = _pieces(problem, tasks, mine)
    document = tasks.document[task]
    gone = documents.load(document, low, high)
    head = documents.load(document, tasks.q_start[task], low)
    tail = documents.load(document, high, tasks.q_stop[task])
    whole = documents.load(document, tasks.q_start[task], tasks.q_stop[task])

    # 2. The one that leaves the lower peak of the two ranks; few queries where that is equal.
    peaks = []
    for rank, after in ((worst, work[worst] - whole + head + tail), (first, work[first] + gone)):
        peaks.append(servers.busy_ps[rank] + np.ceil(after / servers.speed[rank]))
    peak = np.maximum(peaks[0], peaks[1])
    for best in np.lexsort((high - low, peak))[:NUM_TASKS].tolist():
        if peak[best] >= finish[worst]:
            return None
        moved = _move(problem, tasks, int(task[best]), int(low[best]), int(high[best]), first)
        used = memory_bytes(moved, problem.placement, problem.shape, servers.num_ranks)
        if used[first] <= servers.memory_bytes[first]:
            return moved
    return None


def _pieces(problem: Problem, tasks: Tasks, mine: Ints) -> tuple[Ints, Ints, Ints]:
    """(task, start, stop) of all pieces that may leave, a tile and the minimum kept."""
    step, minimum = problem.grain.step, problem.grain.minimum
    start, stop = tasks.q_start[mine], tasks.q_stop[mine]
    first = -(-(start + minimum) // step)
    count = np.maximum((stop - minimum) // step - first + 1, 0)
    cut = expand(first, count) * step
    owner = np.repeat(mine, count)
    return (
        np.concatenate([mine, owner, owner]),
        np.concatenate([start, np.repeat(start, count), cut]),
        np.concatenate([stop, cut, np.repeat(stop, count)]),
    )


def _move(problem: Problem, tasks: Tasks, task: int, low: int, high: int, server: int) -> Tasks:
    """The same tasks with [low, high) of one of them on another server."""
    spans = [
        (int(tasks.q_start[task]), low, int(tasks.server[task])),
        (low, high, server),
        (high, int(tasks.q_stop[task]), int(tasks.server[task])),
    ]
    rows = as_ints([span for span in spans if span[0] < span[1]])
    others = np.arange(len(tasks)) != task
    start = np.concatenate([tasks.q_start[others], rows[:, 0]])
    document = np.concatenate(
        [tasks.document[others], np.full(len(rows), tasks.document[task], dtype=np.int64)]
    )
    return Tasks.build(
        problem.placement,
        problem.reach,
        problem.placement.shard_of(document, start),
        start,
        np.concatenate([tasks.q_stop[others], rows[:, 1]]),
        np.concatenate([tasks.server[others], rows[:, 2]]),
    )


def _loads(problem: Problem, price: Price, tasks: Tasks) -> Ints:
    return problem.priced_documents(price).load(tasks.document, tasks.q_start, tasks.q_stop)
