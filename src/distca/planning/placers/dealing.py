"""Step 3 of balanced placement: slices and medium documents go to workers.

The largest net load comes first, and goes to the worker with the most net headroom.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from distca.planning.placers.senders import even_out_senders
from distca.planning.placers.slices import Slice, SliceLimits, Slicer
from distca.planning.problem import DocumentLoads
from distca.planning.spans import Bools, Floats, Ints, as_ints

WORTH_A_CUT = 0.02  # share of the largest net headroom up to which no slice is cut to fill it


@dataclass(eq=False)
class DealtShards:
    """The shards that workers have got so far, and what workers can still take."""

    headroom: Floats  # [workers]
    tokens_left: Floats  # [workers]
    short: Bools  # [documents] whether a document is to fill up the workers, uncut
    table: Ints  # [shards, 4] worker, document, start, stop

    @classmethod
    def none(cls, capacity: Floats, tokens: float, short: Bools) -> DealtShards:
        return cls(capacity.copy(), np.full_like(capacity, tokens), short, as_ints([[]] * 4).T)

    def put(self, worker: Ints, slices: Sequence[Slice]) -> None:
        """Puts slices on their workers."""
        document, start, stop = (
            as_ints([getattr(one, name) for one in slices])
            for name in ("document", "start", "stop")
        )
        table = np.stack([worker, document, start, stop], axis=1)
        self.table = np.concatenate([self.table, table])
        np.subtract.at(self.headroom, worker, np.array([one.load for one in slices], np.float64))
        np.subtract.at(self.tokens_left, worker, (stop - start).astype(np.float64))

    def net_headroom(self, density: float) -> Floats:
        """[workers] Returns headroom less density x tokens left.

        That is what the tokens that will fill up a worker leave of its headroom.
        """
        return self.headroom - density * self.tokens_left


class LongDocuments(NamedTuple):
    """Slices and medium documents on their workers, before short documents fill these up."""

    documents: DocumentLoads
    capacity: Floats  # [workers]
    tokens: float  # the share of a worker
    short: Bools  # [documents] the others
    worker: Ints  # [slices]
    slices: list[Slice]
    traffic_limit: float  # see ``Slicer.cut_from_the_tail``

    def dealt(self) -> DealtShards:
        """Returns the shards that workers have got, and what they can still take."""
        dealt = DealtShards.none(self.capacity, self.tokens, self.short)
        dealt.put(self.worker, self.slices)
        return dealt

    def with_even_senders(self) -> LongDocuments:
        """Returns the same slices, some of them swapped."""
        num_workers = len(self.capacity)
        worker = even_out_senders(
            self.worker, self.slices, num_workers, self.tokens, self.traffic_limit
        )
        return self._replace(worker=worker)


def deal_slices(
    slicer: Slicer, slices: list[Slice], dealt: DealtShards, traffic_limit: float
) -> tuple[Ints, list[Slice]]:
    """Deals slices, the largest net load first, to the worker with the most net headroom.

    A slice that is too large for it is cut, and its lower end is dealt like the others. Returns the
    worker of each slice, and the slices.

    slices: the largest net load first, as ``Slicer`` cuts them.
    """
    workers = _Workers(dealt, slicer.density, traffic_limit, slicer.grain.spacing)
    lower_ends: list[tuple[float, int, int, Slice]] = []  # a heap
    chosen: list[int] = []
    parts: list[Slice] = []
    first = 0  # of the slices that are left
    while first < len(slices) or lower_ends:
        if not lower_ends or (
            first < len(slices) and _heaviest_first(slices[first]) < lower_ends[0]
        ):
            upper, first = slices[first], first + 1
        else:
            *_, upper = heapq.heappop(lower_ends)
        worker = workers.best(upper)
        headroom, tokens_left = workers.net_headroom[worker], workers.tokens_left[worker]
        net_load = headroom if headroom > workers.worth_a_cut else np.inf
        if upper.size > tokens_left or upper.net > net_load:
            upper, *lower = slicer.split(upper, SliceLimits(net_load, tokens_left))
            for one in lower:
                heapq.heappush(lower_ends, (*_heaviest_first(one), one))
        chosen.append(worker)
        parts.append(upper)
        workers.take(worker, upper)
    return as_ints(chosen), parts


def _heaviest_first(one: Slice) -> tuple[float, int, int]:
    return -one.net, one.document, one.start


class _Workers:
    """What workers can still take while slices are dealt, [workers]."""

    def __init__(
        self, dealt: DealtShards, density: float, traffic_limit: float, shortest: int
    ) -> None:
        self.net_headroom: list[float] = dealt.net_headroom(density).tolist()
        self.tokens_left: list[float] = dealt.tokens_left.tolist()
        self.worth_a_cut = WORTH_A_CUT * max(*self.net_headroom, 0.0)  # if it is more
        # Floats, since these compare with the limits in half the time of integers.
        self._sent_keys, self._received_keys = ([0.0] * len(self.tokens_left) for _ in range(2))
        self._traffic_limit = traffic_limit
        self._shortest = shortest  # tokens of a slice
        # (-net headroom, worker) of those with tokens left, the most net headroom first
        self._order = sorted((-room, worker) for worker, room in enumerate(self.net_headroom))

    def take(self, worker: int, taken: Slice) -> None:
        """Puts a slice on a worker."""
        if self._order:
            del self._order[bisect_left(self._order, (-self.net_headroom[worker], worker))]
        self.net_headroom[worker] -= taken.net
        self.tokens_left[worker] -= taken.size
        self._sent_keys[worker] += taken.num_above * taken.size
        self._received_keys[worker] += taken.start
        if self.tokens_left[worker] >= self._shortest:
            insort(self._order, (-self.net_headroom[worker], worker))

    def best(self, taken: Slice) -> int:
        """Returns the worker with the most net headroom that can take a slice.

        It has net headroom and tokens left for the slice, and stays within the traffic limit. If
        there is none, the traffic limit is given up, then the tokens, then the headroom: the slice
        is cut to fill either, unless the headroom is not worth a cut.
        """
        if not self._order:
            return max(range(len(self.tokens_left)), key=self.tokens_left.__getitem__)
        most, best = -self._order[0][0], self._order[0][1]
        if taken.net > most > self.worth_a_cut:
            return best
        least = min(taken.net, most - self.worth_a_cut)
        sent = self._traffic_limit - taken.num_above * taken.size
        received = self._traffic_limit - taken.start
        tokens_left, size, has_tokens, longest = self.tokens_left, float(taken.size), -1, best
        for negative, worker in self._order:
            if -negative < least:
                break
            if tokens_left[worker] >= size:
                if self._sent_keys[worker] <= sent and self._received_keys[worker] <= received:
                    return worker
                has_tokens = worker if has_tokens < 0 else has_tokens
            elif tokens_left[worker] > tokens_left[longest]:
                longest = worker
        return longest if has_tokens < 0 else has_tokens
