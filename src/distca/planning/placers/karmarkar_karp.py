"""Karmarkar-Karp: whole documents on workers, with about equal time on each.

The largest differencing method for k sets, with which many trainers balance micro-batches. Every
document starts as a partition of its own, with k - 1 empty sets. The two partitions whose sets
differ most are combined, the largest set of one with the smallest of the other, so that their
differences cancel, until one partition is left.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from operator import itemgetter

import numpy as np

from distca.planning.placement import Placement
from distca.planning.problem import Problem
from distca.planning.spans import Ints, as_ints

# The cost of documents that stay together: of one, by its number, or of those of two other sets.
# A plain tuple, since there is one for each step of each combination.
_Set = tuple[int, "int | tuple[_Set, _Set]"]
_cost = itemgetter(0)


def karmarkar_karp(problem: Problem) -> Placement:
    """Places whole documents, so that the worker with the most to do has as little as possible.

    ``max_tokens`` and ``memory_bytes`` limit the tokens of a worker: documents move away from
    workers that have too many, as long as another one has room.
    """
    lengths, workers = problem.placement.lengths, problem.placement.num_workers
    cost = problem.document_ps.tolist()
    worker = as_ints([0] * len(lengths))
    for number, members in enumerate(partition(cost, workers)):
        worker[members] = number
    limit = problem.devices.memory_bytes[:workers] // problem.shape.token_bytes
    _keep_limits(worker, lengths, cost, np.minimum(limit, problem.max_tokens))
    order = np.argsort(worker, kind="stable")
    placement = Placement(
        lengths,
        order,
        np.zeros_like(order),
        lengths[order],
        worker[order],
        workers,
        two_way=problem.placement.two_way,
    )
    problem.check_max_tokens(placement)
    return placement


def partition(cost: Sequence[int], num_sets: int) -> list[list[int]]:
    """Returns ``num_sets`` sets of numbers of documents, with about equal sums of their costs.

    A partition is the list of its non-empty sets, by falling cost. Combining two of them takes
    at most ``num_sets`` steps, whatever the number of documents.
    """
    if num_sets == 1:
        return [list(range(len(cost)))]
    heap: list[tuple[int, int, list[_Set]]] = [
        (-one, number, [(one, number)]) for number, one in enumerate(cost)
    ]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, number, first = heapq.heappop(heap)
        *_, second = heap[0]
        combined = _combine(first, second, num_sets)
        least = combined[-1][0] if len(combined) == num_sets else 0
        heapq.heapreplace(heap, (least - combined[0][0], number, combined))
    sets = [_members(one) for *_, found in heap for one in found]
    return sets + [[] for _ in range(num_sets - len(sets))]


def _combine(first: list[_Set], second: list[_Set], num_sets: int) -> list[_Set]:
    """Joins the largest set of one partition with the smallest of the other, and so on.

    The smallest sets are empty ones, as long as there are any.
    """
    num_joined = max(len(first) + len(second) - num_sets, 0)
    combined = first[: len(first) - num_joined] + second[: len(second) - num_joined]
    largest, smallest = first[len(first) - num_joined :], second[: -num_joined - 1 : -1]
    for one, other in zip(largest, smallest, strict=True):
        combined.append((one[0] + other[0], (one, other)))
    combined.sort(key=_cost, reverse=True)
    return combined


def _members(one: _Set) -> list[int]:
    found, left = [], [one]
    while left:
        _, members = left.pop()
        if isinstance(members, int):
            found.append(members)
        else:
            left.extend(members)
    return sorted(found)


def _keep_limits(worker: Ints, lengths: Ints, cost: Sequence[int], limit: Ints) -> None:
    """Moves the shortest documents of workers with too many tokens to others, in place.

    They cost least for their tokens. Each goes to the worker with the least to do of those that
    can hold it, and stays if there is none.
    """
    tokens = np.bincount(worker, lengths, minlength=len(limit)).astype(np.int64)
    if np.all(tokens <= limit):
        return
    load = [0] * len(limit)
    for document, number in enumerate(worker.tolist()):
        load[number] += cost[document]
    for document in np.argsort(lengths, kind="stable").tolist():
        home, length = int(worker[document]), int(lengths[document])
        if tokens[home] <= limit[home]:
            continue
        others = np.flatnonzero(tokens + length <= limit).tolist()
        if not others:
            continue
        best = min(others, key=lambda number: (load[number], number))
        for number, sign in ((home, -1), (best, 1)):
            tokens[number] += sign * length
            load[number] += sign * cost[document]
        worker[document] = best
