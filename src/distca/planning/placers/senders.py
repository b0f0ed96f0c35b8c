"""Step 7 of balanced placement: workers that would send too much swap slices.

A slice is sent to all slices of its document further up, so those near the head of a long document
are sent many times. Slices are dealt by their net load, and for the last ones only few workers have
headroom, so that some workers get several slices that are sent often. The worker that sends most
determines the time of the exchange. It swaps such a slice with one that is sent less, of about the
same net load. Short documents, which fill up the workers next, make up for the difference.
"""

import heapq
from collections.abc import Sequence

import numpy as np

from distca.planning.placers.slices import Slice
from distca.planning.spans import Ints, as_ints

# docs/planning-experiments.md has the figures behind these constants.
NET_DIFFERENCE = 0.35  # between slices that are swapped, as a share of the largest net load
EXCESS_TOKENS = 0.3  # beyond a worker's share of tokens: heads of documents move away later
LOWER = 0.98  # share of what the worker sends, below which both must stay after a swap
SLICES = 2  # of a worker that are tried
SWAPS = 4  # for each worker, after which the search ends
STUCK = 64  # workers without a swap that helps, after which it ends too


def even_out_senders(
    worker: Ints, slices: Sequence[Slice], num_workers: int, tokens: float, traffic_limit: float
) -> Ints:
    """Returns the workers of slices after swaps.

    tokens: the share of a worker.
    traffic_limit: keys that a worker may send; see ``Slicer.cut_from_the_tail``.
    """
    dealt = _DealtSlices(worker, slices, num_workers, tokens)
    queue = [(-sent, rank) for rank, sent in enumerate(dealt.sent.tolist()) if sent > traffic_limit]
    heapq.heapify(queue)
    num_swaps = num_stuck = 0
    while queue and num_swaps < SWAPS * num_workers and num_stuck < STUCK:
        negative, rank = heapq.heappop(queue)
        if -negative != dealt.sent[rank]:
            continue  # its entry is out of date
        if (other := dealt.swap_one(rank)) is None:
            num_stuck += 1
            continue
        num_swaps += 1
        for changed in (rank, other):
            if dealt.sent[changed] > traffic_limit:
                heapq.heappush(queue, (-int(dealt.sent[changed]), changed))
    return dealt.worker


class _DealtSlices:
    """Slices and their workers, with the keys that each worker sends and receives."""

    def __init__(
        self, worker: Ints, slices: Sequence[Slice], num_workers: int, tokens: float
    ) -> None:
        self.worker = worker.copy()
        self._net = np.array([one.net for one in slices])
        self._size = as_ints([one.size for one in slices])
        self._sends = as_ints([one.num_above * one.size for one in slices])
        self._receives = as_ints([one.start for one in slices])
        self._most_tokens = (1.0 + EXCESS_TOKENS) * tokens
        self._difference = NET_DIFFERENCE * np.abs(self._net).max(initial=0.0)
        self._tokens, self.sent, self._received = (
            _sums(worker, values, num_workers)
            for values in (self._size, self._sends, self._receives)
        )

    def swap_one(self, rank: int) -> int | None:
        """Swaps a slice of a worker that is sent often; returns the other worker, None if none."""
        mine = np.flatnonzero(self.worker == rank)
        for index in mine[np.argsort(-self._sends[mine], kind="stable")[:SLICES]].tolist():
            candidates = self._candidates(index)
            if not len(candidates):
                continue
            others = self.worker[candidates]
            sent, received = (values[candidates] - values[index] for values in self._traffic)
            worst = np.maximum.reduce(
                [
                    self.sent[rank] + sent,
                    self.sent[others] - sent,
                    self._received[rank] + received,
                    self._received[others] - received,
                ]
            )
            best = int(worst.argmin())
            if worst[best] < LOWER * self.sent[rank]:
                self._swap(index, int(candidates[best]))
                return int(others[best])
        return None

    @property
    def _traffic(self) -> tuple[Ints, Ints]:
        return self._sends, self._receives

    def _candidates(self, index: int) -> Ints:
        """Returns the slices of other workers that may take the place of one."""
        rank, growth = self.worker[index], self._size - self._size[index]
        fits = np.abs(self._net - self._net[index]) <= self._difference
        fits &= self._tokens[rank] + growth <= self._most_tokens
        fits &= self._tokens[self.worker] - growth <= self._most_tokens
        fits &= self.worker != rank
        return np.flatnonzero(fits)

    def _swap(self, index: int, other: int) -> None:
        for of_worker, of_slice in (
            (self._tokens, self._size),
            (self.sent, self._sends),
            (self._received, self._receives),
        ):
            growth = of_slice[other] - of_slice[index]
            of_worker[self.worker[index]] += growth
            of_worker[self.worker[other]] -= growth
        self.worker[[index, other]] = self.worker[[other, index]]


def _sums(worker: Ints, values: Ints, num_workers: int) -> Ints:
    """[workers] Returns the sum of the values of each worker."""
    sums = np.zeros(num_workers, np.int64)
    np.add.at(sums, worker, values)
    return sums
