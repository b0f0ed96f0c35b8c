"""Steps 5 and 6 of balanced placement: short documents fill up the workers, tokens are evened out.

A *table* has a row (worker, document, start, stop) for each shard.
"""

import heapq

import numpy as np

from distca.planning.placers.slices import DealtShards
from distca.planning.problem import DocumentLoads, Grain
from distca.planning.spans import Floats, Ints, as_ints, cumulative

# Documents much shorter than a worker's tokens are dealt in groups, so that the time does not
# depend on their number. The last ones are dealt one by one, to fill up the workers evenly.
GROUPS = 256  # of one worker, at most
SINGLES = 32  # of one worker
ROUND = 2
LAST = 4


def fill_up(documents: DocumentLoads, dealt: DealtShards, grain: Grain) -> Ints:
    """Returns the table of all shards, after which token counts differ by one tile at most."""
    order = _densest_first(documents, dealt.short)
    worker = _deal_short(documents, order, dealt)
    short = [worker, order, np.zeros_like(order), documents.lengths[order]]
    table = np.concatenate([as_ints(dealt.shards).reshape(-1, 4), np.stack(short, axis=1)])
    return _even_tokens(table, dealt.tokens_left, grain)


def _densest_first(documents: DocumentLoads, chosen: Ints) -> Ints:
    """Sorts documents by load per token: the longest, and those much shorter than a tile, first."""
    density = documents.whole[chosen] / documents.lengths[chosen]
    return chosen[np.argsort(-density, kind="stable")]


def _deal_short(documents: DocumentLoads, order: Ints, dealt: DealtShards) -> Ints:
    """Puts short documents on the workers with the most net headroom; returns their workers.

    The density is that of the documents still to come. In each round, as many documents as there
    are workers ...
    """
    workers = len(dealt.headroom)
    first = _groups(documents.lengths[order], workers)
    lengths, loads = (
        np.add.reduceat(values[order], first) if len(first) else values[order]
        for values in (documents.lengths, documents.whole)
    )
    tokens_after, load_after = lengths.sum() - np.cumsum(lengths), loads.sum() - np.cumsum(loads)
    chosen = np.empty(len(first), np.int64)
    begin, size = 0, max(workers // ROUND, 1)
    while begin < len(first):
        one = len(first) - begin <= LAST * workers
        last = min(begin + (workers if one else size), len(first)) - 1
        density = float(load_after[last] / tokens_after[last]) if tokens_after[last] > 0 else 0.0
        chunk = slice(begin, last + 1)
        deal = _deal_one_by_one if one else _deal_round
        chosen[chunk] = deal(dealt, lengths[chunk], loads[chunk], density)
        begin = last + 1
    return np.repeat(chosen, np.diff(first, append=len(order)))


def _deal_round(dealt: DealtShards, lengths: Ints, loads: Ints, density: float) -> Ints:
    """Gives one document to each of the workers with the most net headroom."""
    order = np.argsort(-dealt.net_headroom(density), kind="stable")
    has_tokens = order[dealt.tokens_left[order] >= lengths.max()]
    if len(has_tokens) < len(lengths):
        return _deal_one_by_one(dealt, lengths, loads, density)
    heaviest = np.argsort(density * lengths - loads, kind="stable")
    chosen = np.empty(len(lengths), np.int64)
    chosen[heaviest] = has_tokens[: len(lengths)]
    dealt.headroom[chosen] -= loads
    dealt.tokens_left[chosen] -= lengths
    return chosen


def _deal_one_by_one(dealt: DealtShards, lengths: Ints, loads: Ints, density: float) -> Ints:
    """Gives each document to the worker with the most net headroom at that time."""
    headroom, tokens_left = dealt.headroom.tolist(), dealt.tokens_left.tolist()
    heap = [(net, worker) for worker, net in enumerate((-dealt.net_headroom(density)).tolist())]
    heapq.heapify(heap)
    chosen: list[int] = []
    for length, load in zip(lengths.tolist(), loads.tolist(), strict=True):
        while heap and tokens_left[heap[0][1]] < length:
            heapq.heappop(heap)
        if heap:
            negative, worker = heap[0]
            heapq.heapreplace(heap, (negative + load - density * length, worker))
        else:  # the document is longer than what any worker has left
            worker = max(range(len(tokens_left)), key=tokens_left.__getitem__)
        headroom[worker] -= load
        tokens_left[worker] -= length
        chosen.append(worker)
    dealt.headroom[:], dealt.tokens_left[:] = headroom, tokens_left
    return as_ints(chosen)


def _groups(lengths: Ints, workers: int) -> Ints:
    """Returns the index of the first document of each group of consecutive documents."""
    begin = cumulative(lengths)
    group = begin[:-1] // max(int(begin[-1]) // (workers * GROUPS), 1)
    begins = np.diff(group, prepend=-1) > 0
    begins[-SINGLES * workers :] = True
    return np.flatnonzero(begins)


def _even_tokens(table: Ints, tokens_left: Floats, grain: Grain) -> Ints:
    """Moves heads of documents, in whole tiles, until token counts differ by one tile at most."""
    surplus = _surplus_tiles(tokens_left, grain.tile)
    takers = [[int(-tiles), worker] for worker, tiles in enumerate(surplus) if tiles < 0]
    added: list[tuple[int, int, int, int]] = []
    # Heads of whole documents are cut first, such that at least the minimum remains of a document.
    # Then any shard is cut that starts at a tile.
    for minimum in (grain.min_shard, 1):
        worker, _, start, stop = table.T
        at_tile = start % grain.tile == 0 if minimum == 1 else start == 0
        available = np.where(at_tile, (stop - start - minimum) // grain.tile, 0)
        givers = np.flatnonzero((surplus[worker] > 0) & (available > 0))
        for index in givers[np.argsort((start - stop)[givers], kind="stable")].tolist():
            home, document, position, _ = table[index].tolist()
            count = int(min(surplus[home], available[index]))
            surplus[home] -= count
            while count > 0:
                taker = takers[-1]
                moved = min(count, taker[0])
                cut = position + moved * grain.tile
                added.append((taker[1], document, position, cut))
                position, count, taker[0] = cut, count - moved, taker[0] - moved
                if taker[0] == 0:
                    takers.pop()
            table[index, 2] = position
    table = np.concatenate([table, as_ints(added).reshape(-1, 4)])
    return _move_single_tiles(table, len(surplus), grain.tile) if takers else table


def _surplus_tiles(tokens_left: Floats, tile: int) -> Floats:
    """[workers] Returns whole numbers of tiles that workers should give away; they sum to zero."""
    exact = -tokens_left / tile
    tiles: Floats = np.floor(exact)
    largest_remainders = np.argsort(-(exact - tiles), kind="stable")
    tiles[largest_remainders[: round(-float(tiles.sum()))]] += 1
    return tiles


def _move_single_tiles(table: Ints, workers: int, tile: int) -> Ints:
    """Evens out workers whose shards are too short to be cut: one tile or shard at a time."""
    counts = np.bincount(table[:, 0], table[:, 3] - table[:, 2], minlength=workers)
    held = [table[table[:, 0] == worker, 1:].tolist() for worker in range(workers)]
    while counts.max() - counts.min() > tile:
        high, low = int(counts.argmax()), int(counts.argmin())
        document, start, stop = held[high].pop()
        cut = min(start + tile, stop)
        held[low].append([document, start, cut])
        if cut < stop:
            held[high].append([document, cut, stop])
        counts[high] -= cut - start
        counts[low] += cut - start
    return as_ints([(worker, *row) for worker, rows in enumerate(held) for row in rows])
