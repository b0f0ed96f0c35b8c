"""Steps 2 and 3 of balanced placement: documents are cut from the tail, slices go to workers.

The *net* load of a slice is its load less density x tokens: the load beyond that of the short
documents that would otherwise take its place. ``balanced.py`` explains the density.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from distca.planning.placement import Shard
from distca.planning.problem import Grain, PricedDocuments
from distca.planning.search import first_fitting
from distca.planning.spans import Floats, Ints, as_ints

WORTH_A_CUT = 0.02  # share of the largest net headroom up to which no slice is cut to fill it
NUM_SKIPPED = 64  # workers that a slice may skip, because they send or receive too much already


class Slice(NamedTuple):
    """Tokens [start, stop) of a document that stay together, and their load."""

    net: float
    document: int
    start: int
    stop: int
    load: float
    num_above: int  # slices of the document further up, which need the keys of this one

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class SliceLimits:
    """What a slice may take of a worker."""

    density: float  # load per token of the short documents
    net_load: float
    tokens: float


@dataclass(eq=False)
class Bins:
    """What workers can still take, and the shards that they have."""

    headroom: list[float]  # [workers]
    tokens_left: list[float]  # [workers]
    sent_keys: list[float]  # [workers]
    received_keys: list[float]  # [workers]
    shards: list[Shard]
    short: Ints  # documents that are to fill up the workers, uncut

    @classmethod
    def empty(cls, capacity: Floats, tokens: float, short: Ints) -> Bins:
        workers = len(capacity)
        return cls(
            capacity.tolist(), [tokens] * workers, [0.0] * workers, [0.0] * workers, [], short
        )

    def put(self, shard: Shard, load: float) -> None:
        """Adds a shard to its worker."""
        self.headroom[shard.worker] -= load
        self.tokens_left[shard.worker] -= shard.stop - shard.start
        self.shards.append(shard)

    def net_headrooms(self, density: float) -> list[tuple[float, int]]:
        """Returns a heap of (-net headroom, worker).

        Net headroom is headroom less density x tokens left: what the tokens that will fill up the
        worker leave of it.
        """
        both = zip(self.headroom, self.tokens_left, strict=True)
        heap = [(density * tokens - load, worker) for worker, (load, tokens) in enumerate(both)]
        heapq.heapify(heap)
        return heap


def cut_from_the_tail(
    documents: PricedDocuments, chosen: Ints, limits: SliceLimits, grain: Grain
) -> tuple[list[Slice], float]:
    """Cuts documents into slices that fit the limits, and returns the largest number of keys sent.

    The largest number is that of the topmost slices, which receive all keys below them. Tokens with
    k slices above are sent k times, so such a slice is kept shorter than this number / k.
    """
    slices: list[Slice] = []
    document, stop = chosen, documents.lengths[chosen]
    traffic_limit = np.inf
    num_above = 0
    while len(document):
        longest = min(limits.tokens, traffic_limit / max(num_above, 1))
        start = _slice_starts(documents, document, stop, limits, longest, grain)
        load = documents.load(document, start, stop)
        net = load - limits.density * (stop - start)
        above = np.full_like(start, num_above)
        columns = (column.tolist() for column in (net, document, start, stop, load, above))
        slices += [Slice(*row) for row in zip(*columns, strict=True)]
        if num_above == 0 and start.any():
            traffic_limit = float(start.max())
        document, stop = document[start > 0], start[start > 0]
        num_above += 1
    return slices, traffic_limit


def _slice_starts(
    documents: PricedDocuments,
    document: Ints,
    stop: Ints,
    limits: SliceLimits,
    longest: float,
    grain: Grain,
) -> Ints:
    """[documents] Returns the start of the largest slice that ends at ``stop`` and fits.

    The start is 0 if all tokens before ``stop`` fit, or are too few to be cut.
    """
    starts = np.zeros_like(stop)
    net = documents.load(document, starts, stop) - limits.density * stop
    fits = (net <= limits.net_load) & (stop <= longest)
    cut = np.flatnonzero(~fits & (stop >= grain.step + grain.minimum))
    document, stop, net = document[cut], stop[cut], net[cut]
    if not len(cut):
        return starts

    def excess(index: Ints) -> Ints:
        start = index * grain.step
        net = documents.load(document, start, stop) - limits.density * (stop - start)
        return np.rint(net - limits.net_load).astype(np.int64)

    kept = np.maximum(1.0 - limits.net_load / np.maximum(net, 1.0), 0.0)
    guess = (stop * np.sqrt(kept) / grain.step).astype(np.int64)  # net load grows like a square
    highest = (stop - grain.minimum) // grain.step
    index, _ = first_fitting(excess, guess, highest)
    lowest = np.ceil((stop - longest) / grain.step).astype(np.int64)
    starts[cut] = np.minimum(np.maximum(np.maximum(index, lowest), 1), highest) * grain.step
    return starts


def deal_slices(
    documents: PricedDocuments,
    slices: list[Slice],
    bins: Bins,
    density: float,
    traffic_limit: float,
    grain: Grain,
) -> None:
    """Puts slices, the largest net load first, on the worker with the most net headroom.

    A slice that is too large for it is cut, and its lower part is put elsewhere.
    """
    queue = [(-piece.net, piece.document, piece.start, piece) for piece in slices]
    heapq.heapify(queue)
    workers = bins.net_headrooms(density)
    smallest = WORTH_A_CUT * -workers[0][0]
    while queue:
        piece = heapq.heappop(queue)[-1]
        headroom, worker = _take_worker(piece, bins, workers, traffic_limit)
        tokens_left = bins.tokens_left[worker]
        if piece.size > tokens_left or (piece.net > headroom > smallest):
            limits = SliceLimits(density, headroom, tokens_left)
            piece, *lower = _split(documents, piece, limits, grain)
            for part in lower:
                heapq.heappush(queue, (-part.net, part.document, part.start, part))
        bins.put(Shard(worker, piece.document, piece.start, piece.stop), piece.load)
        bins.sent_keys[worker] += piece.num_above * piece.size
        bins.received_keys[worker] += piece.start
        heapq.heappush(workers, (piece.net - headroom, worker))


def _take_worker(
    piece: Slice, bins: Bins, workers: list[tuple[float, int]], traffic_limit: float
) -> tuple[float, int]:
    """Removes a worker for a slice from the heap, and returns (net headroom, worker).

    The best worker has headroom and tokens left for the slice and stays within the traffic limit.
    Else the traffic limit is given up, then the tokens, then the headroom.
    """
    size = piece.size
    skipped: list[tuple[float, int]] = []
    within_limit = above_limit = -1  # indices of the first such workers in ``skipped``
    while (
        workers and within_limit < 0 and len(skipped) < NUM_SKIPPED and piece.net <= -workers[0][0]
    ):
        worker = workers[0][1]
        if bins.tokens_left[worker] >= size:
            if (
                bins.sent_keys[worker] + piece.num_above * size <= traffic_limit
                and bins.received_keys[worker] + piece.start <= traffic_limit
            ):
                within_limit = len(skipped)
            elif above_limit < 0:
                above_limit = len(skipped)
        skipped.append(heapq.heappop(workers))
    if not skipped:
        chosen = heapq.heappop(workers)
    else:
        if within_limit >= 0:
            index = within_limit
        elif above_limit >= 0:
            index = above_limit
        else:
            index = max(range(len(skipped)), key=lambda i: bins.tokens_left[skipped[i][1]])
        chosen = skipped.pop(index)
        for entry in skipped:
            heapq.heappush(workers, entry)
    return -chosen[0], chosen[1]


def _split(
    documents: PricedDocuments, piece: Slice, limits: SliceLimits, grain: Grain
) -> list[Slice]:
    """Returns the upper part of a slice, as large as the limits allow, and the lower part.

    Returns the slice alone if it cannot be cut.
    """
    lowest = -(-(piece.start + grain.minimum) // grain.step)
    lowest = max(lowest, -int(-(piece.stop - limits.tokens) // grain.step))
    highest = (piece.stop - grain.minimum) // grain.step
    if lowest > highest:
        return [piece]
    document, stop = as_ints([piece.document]), as_ints([piece.stop])

    def excess(index: Ints) -> Ints:
        start = (index + lowest) * grain.step
        net = documents.load(document, start, stop) - limits.density * (stop - start)
        return np.rint(net - limits.net_load).astype(np.int64)

    index = 0  # the slice is only too long
    if piece.net > limits.net_load:
        steps = as_ints([highest - lowest])
        index = int(first_fitting(excess, steps // 2, steps)[0][0])
    cut = (index + lowest) * grain.step
    starts, stops = (cut, piece.start), (piece.stop, cut)
    loads = documents.load(document, as_ints(starts), as_ints(stops)).astype(np.float64).tolist()
    return [
        Slice(load - limits.density * (stop - start), piece.document, start, stop, load, above)
        for start, stop, load, above in zip(
            starts, stops, loads, (piece.num_above, piece.num_above + 1), strict=True
        )
    ]
