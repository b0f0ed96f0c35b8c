"""Balanced placement: tokens and attention both even, so that only keys and values travel.

The linear layers do not care where a token lives. So a long document is cut from its TAIL into
slices, each with as much attention as one worker may hold, and the workers are filled up with
short documents, which bring tokens but little attention:

1. Guess the *filler density* phi: the attention per token of what will fill the workers up.
2. Cut documents from the tail. A slice fills a worker when its load, less phi x its tokens,
   equals the worker's capacity less phi x the tokens it must hold: its *net* load.
3. Deal slices and medium documents, largest net load first, to the worker with most net room.
4. Ask whether the short documents can fill what is left (a Lorenz curve); if not, next phi.
5. Deal the short documents whole, longest first, to the worker with most room beyond what its
   remaining tokens are expected to bring.
6. Even the token counts to one tile by moving heads of documents, which weigh next to nothing.

A slice that ends at position m needs m keys, whoever holds them: a document on workers r costs
sum(m_r) - length key tokens. Cutting from the tail makes that sum small; docs/planning.md has more.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from distca.planning.carving import first_fitting
from distca.planning.placement import Placement
from distca.planning.problem import Documents, Grain, Problem
from distca.planning.scheduler import schedule
from distca.planning.servers import Servers
from distca.planning.spans import Floats, Ints, as_ints, cumulative
from distca.planning.traffic import forward_traffic
from distca.planning.zigzag import deal_each_document

PHI_FIRST, PHI_STEP, PHI_TRIES = 0.7, 1.04, 40  # around the density of the short documents
MEDIUM = 0.05  # of a worker's net room: documents above it are dealt one by one
WORTH_A_CUT = 0.15  # of the largest net room: less is not worth cutting a slice for
NUM_SKIPPED = 256  # workers that a slice may pass over to spare their ports
TARGETS = (1.0, 0.6)  # of the tolerance: placements are tried loosely first, then tightly


class Slice(NamedTuple):
    """Tokens [start, stop) of a document, with ``above`` slices of it further up."""

    net: float
    document: int
    start: int
    stop: int
    load: float
    above: int


@dataclass(eq=False)
class _Bins:
    """What the workers can still take, and the shards that they have."""

    area: list[float]  # load
    tokens: list[float]
    sends: list[float]  # key tokens
    receives: list[float]
    shards: list[tuple[int, int, int, int]]  # worker, document, start, stop

    def put(self, worker: int, document: int, start: int, stop: int, load: float) -> None:
        self.area[worker] -= load
        self.tokens[worker] -= stop - start
        self.shards.append((worker, document, start, stop))


def balanced_placement(problem: Problem) -> Placement:
    """The same documents placed anew, tokens per worker equal to one tile.

    Where short documents are too few to fill up with (one document over all workers, say), the
    scheduler has to move tasks as well: then the placement that moves least is taken of the
    nearest miss, documents in order, and every document dealt out by itself.
    """
    cost, workers = problem.cost, problem.servers.workers_only()
    documents = problem.documents(
        lambda q, k, p: cost.forward_ps(q, k, p) + cost.backward_ps(q, k, p)
    )
    nearest: tuple[float, Placement] | None = None
    for target in TARGETS:
        total = int(documents.whole.sum())
        capacity = workers.capacity(total, target * problem.tolerance).astype(np.float64)
        for phi in _filler_densities(documents, capacity):
            bins = _attempt(documents, capacity, phi, problem.grain)
            if bins is None:
                continue
            placement = Placement.from_shards(documents.lengths, bins.shards, len(capacity))
            imbalance = _imbalance(placement, problem, workers)
            if imbalance <= 1.0 + problem.tolerance:
                return placement
            if nearest is None or imbalance < nearest[0]:
                nearest = imbalance, placement
    in_order = Placement.in_order(documents.lengths, len(workers.speed))
    candidates = [in_order]
    dealt = deal_each_document(in_order, in_order.num_workers)
    if np.ptp(dealt.tokens) <= problem.grain.tile:
        candidates.append(dealt)
    if nearest is not None:
        candidates.append(nearest[1])
    return min(candidates, key=lambda candidate: _bytes_moved(candidate, problem))


def _imbalance(placement: Placement, problem: Problem, workers: Servers) -> float:
    """Of every task at home, the larger of forward and backward."""
    worst = 1.0
    for price in (problem.cost.forward_ps, problem.cost.backward_ps):
        loads = problem.documents(price).load(placement.document, placement.start, placement.stop)
        work = np.zeros(placement.num_workers, np.int64)
        np.add.at(work, placement.worker, loads)
        worst = max(worst, workers.imbalance(work))
    return worst


def _bytes_moved(placement: Placement, problem: Problem) -> tuple[float, int]:
    """Of the busiest rank and in all, once the scheduler has mended the placement."""
    problem = replace(problem, placement=placement)
    tasks = schedule(problem, problem.cost.backward_ps)
    traffic = forward_traffic(tasks, placement, problem.shape, problem.servers.node)
    return traffic.worst, traffic.total


def _filler_densities(documents: Documents, capacity: Floats) -> Iterator[float]:
    """Guesses of phi, from below the density of the short documents upwards.

    Small phi leaves much room for slices, so few of them; but the fillers must be that light.
    """
    tokens = documents.lengths.sum() / len(capacity)
    phi = 0.0
    for _ in range(4):
        net_room = float(np.median(capacity)) - phi * tokens
        short = documents.whole - phi * documents.lengths <= MEDIUM * net_room
        phi = float(documents.whole[short].sum() / max(documents.lengths[short].sum(), 1))
    for step in range(PHI_TRIES):
        yield PHI_FIRST * PHI_STEP**step * phi


def _attempt(documents: Documents, capacity: Floats, phi: float, grain: Grain) -> _Bins | None:
    """The workers' shards for one phi, or None where it cannot work."""
    workers = len(capacity)
    tokens = float(documents.lengths.sum()) / workers
    room = float(np.median(capacity)) - phi * tokens
    if room <= 0:
        return None
    medium = documents.whole - phi * documents.lengths > MEDIUM * room
    slices, port_limit = _cut_from_the_tail(
        documents, np.flatnonzero(medium), phi, room, tokens, grain
    )
    bins = _Bins(capacity.tolist(), [tokens] * workers, [0.0] * workers, [0.0] * workers, [])
    if not _deal_slices(documents, slices, bins, phi, port_limit, grain):
        return None
    short = np.flatnonzero(~medium)
    if not _can_fill(documents, short, bins):
        return None
    _deal_short(documents, short, bins)
    _even_tokens(bins, grain)
    return bins


def _cut_from_the_tail(
    documents: Documents, chosen: Ints, phi: float, room: float, tokens: float, grain: Grain
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
        done = document[last], np.zeros_like(stop[last]), stop[last], load[last]
        columns.append((*done, np.full(len(done[0]), above)))
        document, stop, load = document[~last], stop[~last], load[~last]
        if not len(document):
            break

        def excess(index: Ints, document: Ints = document, stop: Ints = stop) -> Ints:
            start = index * grain.tile
            net = documents.load(document, start, stop) - phi * (stop - start)
            return np.rint(net - room).astype(np.int64)

        share = np.maximum(1.0 - room / np.maximum(load - phi * stop, 1.0), 0.0)
        guess = (stop * np.sqrt(share) / grain.tile).astype(np.int64)
        highest = np.maximum((stop - grain.minimum) // grain.tile, 1)
        index = first_fitting(excess, guess, highest)
        shortest = np.ceil((stop - longest) / grain.tile).astype(np.int64)
        least = -(-grain.minimum // grain.tile)
        start = np.minimum(np.maximum(np.maximum(index, shortest), least), highest) * grain.tile
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


def _deal_slices(
    documents: Documents,
    slices: list[Slice],
    bins: _Bins,
    phi: float,
    port_limit: float,
    grain: Grain,
) -> bool:
    """Largest net load first to the worker with most net room; cut where none has enough."""
    queue = [(-piece.net, piece.document, piece.start, piece) for piece in slices]
    heapq.heapify(queue)
    rooms = _net_rooms(bins, phi)
    smallest = -WORTH_A_CUT * rooms[0][0]
    while queue:
        piece = heapq.heappop(queue)[-1]
        found = _most_room(piece, bins, rooms, port_limit)
        if found is None:
            return False
        room, worker = found
        if piece.net > -room > smallest:
            piece, *lower = _split(documents, piece, -room, phi, grain)
            for part in lower:
                heapq.heappush(queue, (-part.net, part.document, part.start, part))
        bins.put(worker, piece.document, piece.start, piece.stop, piece.load)
        bins.sends[worker] += piece.above * (piece.stop - piece.start)
        bins.receives[worker] += piece.start
        heapq.heappush(rooms, (room + piece.net, worker))
    return True


def _net_rooms(bins: _Bins, density: float) -> list[tuple[float, int]]:
    """A heap of (-net room, worker): area beyond what the tokens still to come will bring."""
    both = zip(bins.area, bins.tokens, strict=True)
    rooms = [(density * tokens - area, worker) for worker, (area, tokens) in enumerate(both)]
    heapq.heapify(rooms)
    return rooms


def _split(
    documents: Documents, piece: Slice, room: float, phi: float, grain: Grain
) -> list[Slice]:
    """The upper part of a slice, of net load ``room``, and the lower part; or the slice, uncut."""
    low = -(-(piece.start + grain.minimum) // grain.tile)
    high = (piece.stop - grain.minimum) // grain.tile
    if low > high:
        return [piece]
    document, stop = as_ints([piece.document]), as_ints([piece.stop])

    def excess(index: Ints) -> Ints:
        start = (index + low) * grain.tile
        net = documents.load(document, start, stop) - phi * (stop - start)
        return np.rint(net - room).astype(np.int64)

    steps = as_ints([high - low])
    cut = (int(first_fitting(excess, steps // 2, steps)[0]) + low) * grain.tile
    parts = []
    for start, end, above in ((cut, piece.stop, piece.above), (piece.start, cut, piece.above + 1)):
        load = float(documents.load(document, as_ints([start]), as_ints([end]))[0])
        parts.append(Slice(load - phi * (end - start), piece.document, start, end, load, above))
    return parts


def _most_room(
    piece: Slice, bins: _Bins, rooms: list[tuple[float, int]], port_limit: float
) -> tuple[float, int] | None:
    """Takes the worker with most net room from the heap, passing over those with a busy port."""
    size = piece.stop - piece.start
    passed: list[tuple[float, int]] = []
    best: tuple[float, int] | None = None
    while rooms and (best is None or len(passed) <= NUM_SKIPPED):
        room, worker = heapq.heappop(rooms)
        if bins.tokens[worker] >= size:
            cool = (
                bins.sends[worker] + piece.above * size <= port_limit
                and bins.receives[worker] + piece.start <= port_limit
            )
            if cool and piece.net <= -room:
                if best is not None:
                    passed.append(best)
                best = (room, worker)
                break
            if best is None:
                best = (room, worker)
                continue
        passed.append((room, worker))
    for entry in passed:
        heapq.heappush(rooms, entry)
    return best


def _can_fill(documents: Documents, short: Ints, bins: _Bins) -> bool:
    """Whether the lightest short documents fit where area per token is least, and so on upwards."""
    area, tokens = np.asarray(bins.area), np.asarray(bins.tokens)
    lengths, loads = documents.lengths[short], documents.whole[short]
    lightest = np.argsort(loads / lengths, kind="stable")
    filled, load = cumulative(lengths[lightest]), cumulative(loads[lightest])
    tightest = np.argsort(area / np.maximum(tokens, 1.0), kind="stable")
    needed = np.interp(np.cumsum(tokens[tightest]), filled, load)
    slack = 0.002 * float(np.mean(area) + needed[-1] / len(area))
    return bool(np.all(needed <= np.cumsum(area[tightest]) + slack))


def _deal_short(documents: Documents, short: Ints, bins: _Bins) -> None:
    """Longest first, to the worker with most area beyond what its other tokens will bring."""
    workers = len(bins.area)
    order = short[np.argsort(-documents.lengths[short], kind="stable")]
    lengths, loads = documents.lengths[order], documents.whole[order]
    tokens_left, load_left = lengths.sum() - np.cumsum(lengths), loads.sum() - np.cumsum(loads)
    for first in range(0, len(order), workers):
        chunk = slice(first, min(first + workers, len(order)))
        last = chunk.stop - 1
        density = float(load_left[last] / tokens_left[last]) if tokens_left[last] > 0 else 0.0
        rooms = _net_rooms(bins, density)
        rows = zip(
            order[chunk].tolist(), lengths[chunk].tolist(), loads[chunk].tolist(), strict=True
        )
        for document, length, load in rows:
            while rooms and bins.tokens[rooms[0][1]] < length:
                heapq.heappop(rooms)
            if rooms:
                room, worker = rooms[0]
                heapq.heapreplace(rooms, (room + load - density * length, worker))
            else:
                worker = max(range(workers), key=bins.tokens.__getitem__)
            bins.put(worker, document, 0, length, load)


def _even_tokens(bins: _Bins, grain: Grain) -> None:
    """Moves heads of documents, in whole tiles, until token counts differ by one tile at most."""
    tile, shards = grain.tile, bins.shards
    surplus = -np.asarray(bins.tokens) / tile
    give = np.floor(surplus)
    most_left = np.argsort(-(surplus - give), kind="stable")
    give[most_left[: round(-float(give.sum()))]] += 1  # now they sum to zero
    takers = [[int(-n), w] for w, n in enumerate(give) if n < 0]
    longest_first = sorted(range(len(shards)), key=lambda i: shards[i][2] - shards[i][3])
    # What is left of a document is at least the minimum, unless there are too few long ones.
    for least in (grain.minimum, 1):
        for index in longest_first:
            worker, document, start, stop = shards[index]
            available = (stop - start - least) // tile if start % tile == 0 else 0
            count = int(min(give[worker], available))
            if count <= 0 or (start > 0 and least > 1):
                continue
            give[worker] -= count
            while count > 0:
                taker = takers[-1]
                moved = min(count, taker[0])
                shards.append((taker[1], document, start, start + moved * tile))
                start, count, taker[0] = start + moved * tile, count - moved, taker[0] - moved
                if taker[0] == 0:
                    takers.pop()
            shards[index] = (worker, document, start, stop)
