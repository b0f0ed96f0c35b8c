"""Balanced placements with different densities, compared by what they move and by their load."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from distca.planning.placers.dealing import LongDocuments
from distca.planning.problem import Problem
from distca.planning.spans import Ints

# docs/planning-experiments.md has the figures behind these constants.
MOVED_TASKS = 2.0  # their bytes, relative to those of ideal cuts
LEFT_TO_SAVE = 0.05  # share of the bytes up to which moving tasks is as good as another density
CLOSER = 0.5  # share of the surplus to which the next density must lower it, or move fewer bytes
MUCH_CLOSER = (0.95, 0.8)  # shares of the bytes and the surplus, of which it must reach one as well
ALIKE = 0.02  # relative difference between surpluses that are about the same


class Attempt(NamedTuple):
    """A placement for one density, with every task at home."""

    moved_bytes: int  # an estimate, after scheduling
    task_bytes: int  # those of them that move because workers have a surplus
    received_bytes: int  # the most keys that a worker receives
    peak_bytes: int  # the most keys that a worker sends or receives
    surplus: float  # load above the capacity of workers, as a share; the larger of both directions
    ahead: float  # by how much the imbalance of forward is larger than that of backward
    density: int  # its index
    long: LongDocuments
    table: Ints  # of shards, as in ``filling``

    @property
    def quality(self) -> tuple[bool, float]:
        return self.surplus > 0.0, self.moved_bytes

    @property
    def is_enough(self) -> bool:
        """Whether no density can save much more: hardly any task has to move."""
        return self.task_share <= LEFT_TO_SAVE

    @property
    def task_share(self) -> float:
        """The share of the bytes that another density may save, at most."""
        return self.task_bytes / max(self.moved_bytes, 1)

    def is_like(self, other: Attempt) -> bool:
        """Returns whether the surplus is about the same."""
        return abs(self.surplus - other.surplus) <= ALIKE * other.surplus

    def is_closer(self, other: Attempt, much: bool = False) -> bool:
        """Returns whether it moves fewer bytes, or has a much smaller surplus.

        much: whether the bytes must be much fewer, or the surplus smaller as well.
        """
        share_of_bytes, share_of_surplus = MUCH_CLOSER
        closer = self.moved_bytes < other.moved_bytes or self.surplus <= CLOSER * other.surplus
        return closer and (
            not much
            or self.moved_bytes <= share_of_bytes * other.moved_bytes
            or self.surplus <= share_of_surplus * other.surplus
        )


class Measure:
    """Estimates the bytes that placements move: keys, and the tasks of workers with a surplus."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.slices = 0  # of all attempts
        costs = (problem.cost.forward, problem.cost.backward)
        self._directions = [(cost, problem.document_loads(cost.ps)) for cost in costs]

    def __call__(self, index: int, long: LongDocuments, table: Ints) -> Attempt:
        problem, shape = self.problem, self.problem.shape
        workers = problem.devices.workers_only
        self.slices += len(long.slices)
        worker, document, start, stop = table.T
        keys = problem.masks.num_keys(document, start, stop) - (stop - start)
        sent = np.zeros_like(keys)
        cut = np.flatnonzero(stop - start < self._directions[0][1].tokens[document])
        sent[cut] = (stop - start)[cut] * _num_after(document[cut], start[cut])
        # P pairs move for c sqrt(P) bytes (docs/planning.md, "The cost of a move").
        q, kv = shape.qo_bytes, shape.kv_bytes
        c = MOVED_TASKS * float(np.sqrt(2.0 * ((q + kv) ** 2 - q**2)))
        surplus, task_bytes, imbalance = list[float](), list[Ints](), list[float]()
        for cost, documents in self._directions:
            load = np.zeros(workers.num_ranks, np.int64)
            np.add.at(load, worker, documents.load_of_shards(document, start, stop))
            total = int(load.sum())
            above = np.maximum(load - workers.capacity(total, problem.tolerance), 0)
            surplus.append(int(above.sum()) / max(total, 1))
            task_bytes.append(np.rint(c * np.sqrt(above / cost.min_ps_per_pair)).astype(np.int64))
            imbalance.append(workers.imbalance(load))
        of_tasks = max(task_bytes, key=lambda one: int(one.sum()))
        received, sending = np.zeros_like(of_tasks), np.zeros_like(of_tasks)
        np.add.at(received, worker, kv * keys)
        np.add.at(sending, worker, kv * sent)
        return Attempt(
            moved_bytes=kv * int(keys.sum()) + int(of_tasks.sum()),
            task_bytes=int(of_tasks.sum()),
            received_bytes=int(received.max()),
            peak_bytes=int(max(received.max(), sending.max())),
            surplus=max(surplus),
            ahead=imbalance[0] - imbalance[1],
            density=index,
            long=long,
            table=table,
        )


def _num_after(document: Ints, start: Ints) -> Ints:
    """Returns how many shards of the same document start after each one."""
    order = np.lexsort((start, document))
    last = np.searchsorted(document[order], document[order], side="right") - 1
    after = np.empty_like(document)
    after[order] = last - np.arange(len(order))
    return after
