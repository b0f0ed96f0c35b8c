"""Steps 2 and 3 of balanced placement: documents are cut from the tail, slices go to workers.

The *net* load of a slice is its load less density x tokens: the load beyond that of the short
documents that would otherwise take its place. ``balanced.py`` explains the density.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from distca.planning.problem import DocumentLoads, Grain
from distca.planning.search import first_fitting
from distca.planning.spans import Bools, Floats, Ints, as_ints

WORTH_A_CUT = 0.02  # share of the largest net headroom up to which no slice is cut to fill it


class Slice(NamedTuple):
    """Tokens [start, stop) of a document that stay together, and their load."""

    net: float
    document: int
    start: int
    stop: int
    load: float
    num_above: int  # slices of the document further up, which need the keys of this one
    size: int  # tokens


class SliceLimits(NamedTuple):
    """What a slice may take of a worker."""

    net_load: float
    tokens: float


@dataclass(frozen=True)
class Slicer:
    """Cuts documents into slices. Cuts are multiples of ``grain.spacing``."""

    documents: DocumentLoads
    density: float  # load per token of the short documents
    grain: Grain

    def cut_from_the_tail(self, chosen: Ints, limits: SliceLimits) -> tuple[list[Slice], float]:
        """Cuts documents into slices that fit the limits; also returns the most keys sent at once.

        These are the keys of the topmost slices, which receive all keys below them. Tokens with k
        slices above are sent k times, so such a slice is kept shorter than this number / k.
        """
        slices: list[Slice] = []
        document, stop = chosen, self.documents.lengths[chosen]
        prefix = self.documents.prefix
        traffic_limit = np.inf
        num_above = 0
        while len(document):
            longest = min(limits.tokens, traffic_limit / max(num_above, 1))
            start = self._starts(document, stop, SliceLimits(limits.net_load, longest))
            load = self.documents.load(document, start, stop)
            slices += self._slices(document, start, stop, load, np.full_like(start, num_above))
            left = start > prefix[document]
            if num_above == 0 and left.any():
                traffic_limit = float(start[left].max())
            document, stop = document[left], start[left]
            num_above += 1
        return slices, traffic_limit

    def split(self, whole: Slice, limits: SliceLimits) -> list[Slice]:
        """Returns the upper end of a slice, as large as the limits allow, and the lower end.

        Returns the slice alone if it cannot be cut.
        """
        grain = self.grain
        shortest = -int((limits.tokens - whole.stop) // grain.spacing)
        lowest = max(grain.first_cut(whole.start), shortest)
        highest = grain.last_cut(whole.stop)
        if lowest > highest:
            return [whole]
        if whole.net <= limits.net_load:  # the slice is only too long
            highest = lowest
        # Both ends for all cuts at once take less time than a search for the cut does.
        cut = np.arange(lowest, highest + 1) * grain.spacing
        start, stop = np.stack([cut, np.full_like(cut, whole.start)]), np.stack([cut, cut])
        stop[0] = whole.stop
        load = self.documents.load(np.full_like(cut, whole.document), start, stop)
        net = load - self.density * (stop - start)
        best = int(np.append(net[0, :-1] <= limits.net_load, True).argmax())
        start, stop, load = start[:, best], stop[:, best], load[:, best]  # of the upper, the lower
        num_above = whole.num_above + np.arange(2)
        return self._slices(np.full(2, whole.document), start, stop, load, num_above)

    def _starts(self, document: Ints, stop: Ints, limits: SliceLimits) -> Ints:
        """[documents] Returns the start of the largest slice that ends at ``stop`` and fits.

        The start is that of the document if all tokens before ``stop`` fit, or are too few to be
        cut.
        """
        grain, starts = self.grain, self.documents.prefix[document]
        net = self._net_load(document, starts, stop)
        fits = (net <= limits.net_load) & (stop - starts <= limits.tokens)
        cut = np.flatnonzero(~fits & (grain.last_cut(stop) >= grain.first_cut(starts)))
        document, stop, net, first = document[cut], stop[cut], net[cut], starts[cut]
        if not len(cut):
            return starts
        kept = np.maximum(1.0 - limits.net_load / np.maximum(net, 1.0), 0.0)
        # Net load grows like a square.
        kept += (1.0 - kept) * (first / stop) ** 2
        guess = stop * np.sqrt(kept) / grain.spacing

        def excess(index: Ints) -> Ints:
            net = self._net_load(document, index * grain.spacing, stop)
            return np.rint(net - limits.net_load).astype(np.int64)

        last = grain.last_cut(stop)
        slope = net / np.maximum((stop / grain.spacing) ** 2 - (first / grain.spacing) ** 2, 1.0)
        index = first_fitting(excess, guess.astype(np.int64), last, slope, np.zeros_like(last))
        shortest = np.ceil((stop - limits.tokens) / grain.spacing).astype(np.int64)
        index = np.minimum(np.maximum(np.maximum(index, shortest), grain.first_cut(first)), last)
        starts[cut] = index * grain.spacing
        return starts

    def _net_load(self, document: Ints, start: Ints, stop: Ints) -> Floats:
        net: Floats = self.documents.load(document, start, stop) - self.density * (stop - start)
        return net

    def _slices(
        self, document: Ints, start: Ints, stop: Ints, load: Ints, num_above: Ints
    ) -> list[Slice]:
        size = stop - start
        net = load - self.density * size
        columns = (net, document, start, stop, load, num_above, size)
        return list(map(Slice, *(column.tolist() for column in columns)))


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


def deal_slices(
    slicer: Slicer, slices: list[Slice], dealt: DealtShards, traffic_limit: float
) -> tuple[Ints, list[Slice]]:
    """Deals slices, the largest net load first, to the worker with the most net headroom.

    A slice that is too large for it is cut, and its lower end is dealt like the others. Returns the
    worker of each slice, and the slices.
    """
    queue = [_heaviest_first(one) for one in slices]
    heapq.heapify(queue)
    workers = _Workers(dealt, slicer.density, traffic_limit)
    smallest = WORTH_A_CUT * max(workers.net_headroom)
    chosen: list[int] = []
    parts: list[Slice] = []
    while queue:
        *_, upper = heapq.heappop(queue)
        worker = workers.best(upper)
        headroom, tokens_left = workers.net_headroom[worker], workers.tokens_left[worker]
        if upper.size > tokens_left or (upper.net > headroom > smallest):
            upper, *lower = slicer.split(upper, SliceLimits(headroom, tokens_left))
            for one in lower:
                heapq.heappush(queue, _heaviest_first(one))
        chosen.append(worker)
        parts.append(upper)
        workers.take(worker, upper)
    return as_ints(chosen), parts


def _heaviest_first(one: Slice) -> tuple[float, int, int, Slice]:
    """Returns the entry of a slice in a heap, whose first entry is the smallest."""
    return -one.net, one.document, one.start, one


class _Workers:
    """What workers can still take while slices are dealt; one entry of a list changes at a time.

    The worker with the most net headroom comes first in a heap. Entries of workers that have taken
    a slice since then are out of date, and are dropped when they come first.
    """

    def __init__(self, dealt: DealtShards, density: float, traffic_limit: float) -> None:
        self.net_headroom: list[float] = dealt.net_headroom(density).tolist()
        self.tokens_left: list[float] = dealt.tokens_left.tolist()
        self._sent_keys = [0.0] * len(self.tokens_left)
        self._received_keys = [0.0] * len(self.tokens_left)
        self._traffic_limit = traffic_limit
        self._heap = [(-net, worker) for worker, net in enumerate(self.net_headroom)]
        heapq.heapify(self._heap)
        self._arrays = np.array(
            self._lists
        )  # [4, workers] the same, but for workers in ``_changed``
        self._changed: list[int] = []

    @property
    def _lists(self) -> tuple[list[float], ...]:
        return self.net_headroom, self.tokens_left, self._sent_keys, self._received_keys

    def take(self, worker: int, taken: Slice) -> None:
        """Puts a slice on a worker."""
        net_headroom = self.net_headroom[worker] = self.net_headroom[worker] - taken.net
        self.tokens_left[worker] -= taken.size
        self._sent_keys[worker] += taken.num_above * taken.size
        self._received_keys[worker] += taken.start
        self._changed.append(worker)
        update = heapq.heapreplace if self._heap[0][1] == worker else heapq.heappush
        update(self._heap, (-net_headroom, worker))

    def best(self, taken: Slice) -> int:
        """Returns the worker with the most net headroom that can take a slice.

        It has net headroom and tokens left for the slice, and stays within the traffic limit. If
        there is none, the traffic limit is given up, then the tokens, then the headroom.
        """
        heap, net_headroom = self._heap, self.net_headroom
        while -heap[0][0] != net_headroom[heap[0][1]]:
            heapq.heappop(heap)
        best = heap[0][1]
        sent = self._traffic_limit - taken.num_above * taken.size
        received = self._traffic_limit - taken.start
        if taken.net > net_headroom[best] or (
            self.tokens_left[best] >= taken.size
            and self._sent_keys[best] <= sent
            and self._received_keys[best] <= received
        ):
            return best
        return self._best_of_all(taken, sent, received)

    def _best_of_all(self, taken: Slice, sent: float, received: float) -> int:
        """Compares all workers, if that with the most net headroom cannot take a slice."""
        changed, self._changed = list(set(self._changed)), []
        self._arrays[:, changed] = [[one[worker] for worker in changed] for one in self._lists]
        net_headroom, tokens_left, sent_keys, received_keys = self._arrays
        fits = net_headroom >= taken.net
        has_tokens = fits & (tokens_left >= taken.size)
        if not has_tokens.any():
            return int(np.where(fits, tokens_left, -np.inf).argmax())
        within_limit = has_tokens & (sent_keys <= sent) & (received_keys <= received)
        chosen = within_limit if within_limit.any() else has_tokens
        return int(np.where(chosen, net_headroom, -np.inf).argmax())
