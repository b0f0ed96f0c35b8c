"""Long documents cut from the tail into slices, and the slices dealt to workers.

Steps 2 and 3 of balanced placement (``placers.balanced``). *Net* load is load less phi x tokens:
what a slice takes of a worker beyond what the short documents in its place would.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from distca.planning.problem import Grain, PricedDocuments
from distca.planning.schedulers.cuts import first_fitting
from distca.planning.spans import Floats, Ints, as_ints

WORTH_A_CUT = 0.02  # of the largest net room: less is not worth cutting a slice for
NUM_SKIPPED = 64  # workers that a slice may pass over to spare their ports


class Slice(NamedTuple):
    """Tokens [start, stop) of a document, with ``above`` slices of it further up."""

    net: float
    document: int
    start: int
    stop: int
    load: float
    above: int


@dataclass(eq=False)
class Bins:
    """What the workers can still take, and the shards that they have."""

    area: list[float]  # load
    tokens: list[float]
    sends: list[float]  # key tokens
    receives: list[float]
    shards: list[tuple[int, int, int, int]]  # worker, document, start, stop
    short: Ints  # documents that are to fill up, whole

    @classmethod
    def empty(cls, capacity: Floats, tokens: float, short: Ints) -> Bins:
        workers = len(capacity)
        nothing = [0.0] * workers
        return cls(capacity.tolist(), [tokens] * workers, list(nothing), list(nothing), [], short)

    def put(self, worker: int, document: int, start: int, stop: int, load: float) -> None:
        self.area[worker] -= load
        self.tokens[worker] -= stop - start
        self.shards.append((worker, document, start, stop))


def cut_from_the_tail(
    documents: PricedDocuments, chosen: Ints, phi: float, room: float, tokens: float, grain: Grain
) -> tuple[list[Slice], float]:
    """Slices of net load ``room``, all documents at once; and the most key tokens one receives.

    What k slices lie above is sent k times: it is kept shorter than the port limit / k.
    """
    columns: list[tuple[Ints, ...]] = []
    document, stop = chosen, documents.lengths[chosen]
    port_limit = np.inf
    above = 0
    while len(document):
        load = documents.load(document, np.zeros_like(stop), stop)
        longest = min(tokens, port_limit / max(above, 1))
        last = (load - phi * stop <= room) & (stop <= longest)
        last |= stop < grain.step + grain.minimum  # too short to be cut
        done = document[last], np.zeros_like(stop[last]), stop[last], load[last]
        columns.append((*done, np.full(len(done[0]), above)))
        document, stop, load = document[~last], stop[~last], load[~last]
        if not len(document):
            break

        def excess(index: Ints, document: Ints = document, stop: Ints = stop) -> Ints:
            start = index * grain.step
            net = documents.load(document, start, stop) - phi * (stop - start)
            return np.rint(net - room).astype(np.int64)

        share = np.maximum(1.0 - room / np.maximum(load - phi * stop, 1.0), 0.0)
        guess = (stop * np.sqrt(share) / grain.step).astype(np.int64)
        highest = (stop - grain.minimum) // grain.step
        index, _ = first_fitting(excess, guess, highest)
        shortest = np.ceil((stop - longest) / grain.step).astype(np.int64)
        start = np.minimum(np.maximum(np.maximum(index, shortest), 1), highest) * grain.step
        if above == 0:
            port_limit = float(start.max())
        load = documents.load(document, start, stop)
        columns.append((document, start, stop, load, np.full(len(start), above)))
        stop = start
        above += 1
    if not columns:
        return [], port_limit
    document, start, stop, load, aboves = (np.concatenate(c) for c in zip(*columns, strict=True))
    net = load - phi * (stop - start)
    fields = (column.tolist() for column in (net, document, start, stop, load, aboves))
    return [Slice(*row) for row in zip(*fields, strict=True)], port_limit


def deal_slices(
    documents: PricedDocuments,
    slices: list[Slice],
    bins: Bins,
    phi: float,
    port_limit: float,
    grain: Grain,
) -> None:
    """Largest net load first to the worker with most net room; cut where none has enough."""
    queue = [(-piece.net, piece.document, piece.start, piece) for piece in slices]
    heapq.heapify(queue)
    rooms = net_rooms(bins, phi)
    smallest = -WORTH_A_CUT * rooms[0][0]
    while queue:
        piece = heapq.heappop(queue)[-1]
        room, worker = _most_room(piece, bins, rooms, port_limit)
        long, heavy = piece.stop - piece.start > bins.tokens[worker], piece.net > -room
        if long or (heavy and -room > smallest):
            piece, *lower = _split(documents, piece, -room, bins.tokens[worker], phi, grain)
            for part in lower:
                heapq.heappush(queue, (-part.net, part.document, part.start, part))
        bins.put(worker, piece.document, piece.start, piece.stop, piece.load)
        bins.sends[worker] += piece.above * (piece.stop - piece.start)
        bins.receives[worker] += piece.start
        heapq.heappush(rooms, (room + piece.net, worker))


def net_rooms(bins: Bins, density: float) -> list[tuple[float, int]]:
    """A heap of (-net room, worker): area beyond what the tokens still to come will bring."""
    both = zip(bins.area, bins.tokens, strict=True)
    rooms = [(density * tokens - area, worker) for worker, (area, tokens) in enumerate(both)]
    heapq.heapify(rooms)
    return rooms


def _most_room(
    piece: Slice, bins: Bins, rooms: list[tuple[float, int]], port_limit: float
) -> tuple[float, int]:
    """Takes a worker from the heap: with room, tokens and a cool port; else as near as it gets."""
    size = piece.stop - piece.start
    passed: list[tuple[float, int]] = []
    cool = hot = -1
    while rooms and cool < 0 and len(passed) < NUM_SKIPPED and piece.net <= -rooms[0][0]:
        worker = rooms[0][1]
        if bins.tokens[worker] >= size:
            if (
                bins.sends[worker] + piece.above * size <= port_limit
                and bins.receives[worker] + piece.start <= port_limit
            ):
                cool = len(passed)
            elif hot < 0:
                hot = len(passed)
        passed.append(heapq.heappop(rooms))
    if not passed:
        return heapq.heappop(rooms)
    if cool < 0 and hot < 0:  # room, but not for so many tokens
        hot = max(range(len(passed)), key=lambda index: bins.tokens[passed[index][1]])
    chosen = passed.pop(cool if cool >= 0 else hot)
    for entry in passed:
        heapq.heappush(rooms, entry)
    return chosen


def _split(
    documents: PricedDocuments, piece: Slice, room: float, tokens: float, phi: float, grain: Grain
) -> list[Slice]:
    """The upper part of a slice, as large as room and tokens allow, and the lower; or it, uncut."""
    low = -(-(piece.start + grain.minimum) // grain.step)
    low = max(low, -int(-(piece.stop - tokens) // grain.step))
    high = (piece.stop - grain.minimum) // grain.step
    if low > high:
        return [piece]
    document, stop = as_ints([piece.document]), as_ints([piece.stop])

    def excess(index: Ints) -> Ints:
        start = (index + low) * grain.step
        net = documents.load(document, start, stop) - phi * (stop - start)
        return np.rint(net - room).astype(np.int64)

    steps = as_ints([high - low])
    index, _ = first_fitting(excess, steps // 2, steps)
    cut = (int(index[0]) + low) * grain.step
    if piece.net <= room:
        cut = low * grain.step  # only too long
    parts = []
    for start, end, above in ((cut, piece.stop, piece.above), (piece.start, cut, piece.above + 1)):
        load = float(documents.load(document, as_ints([start]), as_ints([end]))[0])
        parts.append(Slice(load - phi * (end - start), piece.document, start, end, load, above))
    return parts
