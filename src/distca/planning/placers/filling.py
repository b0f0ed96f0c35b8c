"""Steps 4 and 5 of balanced placement: short documents fill up the workers, tokens are evened out.

A *table* has a row (worker, document, start, stop) for each shard.
"""

import heapq
from itertools import islice

import numpy as np

from distca.planning.placers.dealing import DealtShards
from distca.planning.problem import DocumentLoads, Grain
from distca.planning.spans import Floats, Ints, as_ints, cumulative, expand

# Documents much shorter than a worker's tokens are dealt in groups, so that the time does not
# depend on their number. Then single documents follow, and the last ones are dealt one by one
# instead of many at once, to fill up the workers evenly.
GROUPS = 64  # of one worker, at most
SINGLES = 32  # of one worker
ONE_BY_ONE = 8  # of one worker
SPREAD = 0.01  # the least net load that a document counts, as a share of its load


def fill_up(documents: DocumentLoads, dealt: DealtShards, grain: Grain) -> Ints:
    """Returns the table of all shards, after which token counts differ by one tile at most."""
    order = documents.densest_first[dealt.short[documents.densest_first]]
    worker = _deal_short(documents, order, dealt)
    short = [worker, order, documents.prefix[order], documents.lengths[order]]
    table = np.concatenate([dealt.table, np.stack(short, axis=1)])
    return _even_tokens(table, dealt.tokens_left, grain)


def _deal_short(documents: DocumentLoads, order: Ints, dealt: DealtShards) -> Ints:
    """Puts short documents on the worker with the most net headroom; returns their workers.

    The density is that of the documents still to come, which is computed again for each round.
    Since it only falls, a document never leaves its worker with more net headroom than before.
    """
    workers = len(dealt.headroom)
    first = _groups(documents.tokens[order], workers)
    lengths, loads = (
        np.add.reduceat(values[order], first) if len(first) else values[order]
        for values in (documents.tokens.astype(np.float64), documents.whole.astype(np.float64))
    )
    tokens_after, load_after = lengths.sum() - np.cumsum(lengths), loads.sum() - np.cumsum(loads)
    num_at_once = max(len(first) - ONE_BY_ONE * workers, 0)
    chosen: list[int] = []
    while len(chosen) < len(first):
        begin = len(chosen)
        end = min(begin + workers, num_at_once if begin < num_at_once else len(first))
        left = tokens_after[end - 1]
        density = float(load_after[end - 1] / left) if left > 0 else 0.0
        part = lengths[begin:end], loads[begin:end], density
        at_once = _deal_at_once(dealt, *part) if begin < num_at_once else []
        chosen += at_once or _deal_one_by_one(dealt, *part)
    return np.repeat(as_ints(chosen), np.diff(first, append=len(order)))


def _deal_at_once(dealt: DealtShards, lengths: Floats, loads: Floats, density: float) -> list[int]:
    """Puts documents on workers such that the least net headroom remains as large as possible.

    All documents count as equal, which later ones make up for. Only the first ones are put if there
    are not enough tokens left for all, and none if no worker has enough for the longest.
    """
    longest = lengths.max()
    able = np.flatnonzero(dealt.tokens_left >= longest)
    if not len(able):
        return []
    net_headroom = dealt.net_headroom(density)[able]
    net_load = float(np.maximum(loads - density * lengths, SPREAD * loads).mean())
    # 1. The level down to which net headroom is filled.
    falling = -np.sort(-net_headroom)
    levels = (np.cumsum(falling) - len(lengths) * net_load) / np.arange(1, len(falling) + 1)
    level = levels[np.flatnonzero(falling > levels)[-1]]
    # 2. What each worker can take above that level.
    above_level = np.ceil(np.maximum(net_headroom - level, 0.0) / net_load)
    count = np.minimum(above_level, dealt.tokens_left[able] // longest).astype(np.int64)
    number = np.repeat(np.arange(len(able)), count)
    before = expand(np.zeros_like(count), count)  # documents that the worker takes first
    # 3. Each document goes where the most net headroom is left.
    order = np.argsort(before * net_load - net_headroom[number], kind="stable")
    worker = able[number[order[: len(lengths)]]]
    np.subtract.at(dealt.headroom, worker, loads[: len(worker)])
    np.subtract.at(dealt.tokens_left, worker, lengths[: len(worker)])
    chosen: list[int] = worker.tolist()
    return chosen


def _deal_one_by_one(
    dealt: DealtShards, lengths: Floats, loads: Floats, density: float
) -> list[int]:
    """Puts documents, one after the other, on the worker with the most net headroom.

    Once a document is longer than what any worker has left, the rest go to the worker with the
    most tokens left.
    """
    headroom, tokens_left = dealt.headroom.tolist(), dealt.tokens_left.tolist()
    net_headroom = dealt.net_headroom(density).tolist()
    has_tokens = np.flatnonzero(dealt.tokens_left >= lengths.min()).tolist()
    by_headroom = [(-net_headroom[worker], worker) for worker in has_tokens]
    heapq.heapify(by_headroom)
    by_tokens: list[tuple[float, int]] = []
    chosen = []
    for length, load in zip(lengths.tolist(), loads.tolist(), strict=True):
        while by_headroom and tokens_left[by_headroom[0][1]] < length:
            heapq.heappop(by_headroom)
        if by_headroom:
            negative, worker = by_headroom[0]
            heapq.heapreplace(by_headroom, (negative + load - density * length, worker))
        else:
            if not by_tokens:
                by_tokens = [(-tokens, worker) for worker, tokens in enumerate(tokens_left)]
                heapq.heapify(by_tokens)
            negative, worker = by_tokens[0]
            heapq.heapreplace(by_tokens, (negative + length, worker))
        headroom[worker] -= load
        tokens_left[worker] -= length
        chosen.append(worker)
    dealt.headroom[:], dealt.tokens_left[:] = headroom, tokens_left
    return chosen


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
        givers = givers[np.argsort((start - stop)[givers], kind="stable")]  # the longest first
        given = _shares(worker[givers], available[givers], surplus)
        surplus -= np.bincount(worker[givers], given, minlength=len(surplus))
        for index, count in zip(givers[given > 0].tolist(), given[given > 0].tolist(), strict=True):
            _, document, position, _ = table[index].tolist()
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
    return _move_tiles(table, len(surplus), grain.tile) if takers else table


def _shares(worker: Ints, available: Ints, surplus: Floats) -> Ints:
    """Returns how much of what is available gives away the surplus of each worker, in order."""
    order = np.argsort(worker, kind="stable")
    before = cumulative(available[order])[:-1]
    first = np.searchsorted(worker[order], worker[order])
    given = np.empty_like(available)
    given[order] = surplus[worker[order]] - (before - before[first])
    return np.minimum(np.maximum(given, 0), available)


def _surplus_tiles(tokens_left: Floats, tile: int) -> Floats:
    """[workers] Returns whole numbers of tiles that workers should give away; they sum to zero."""
    exact = -tokens_left / tile
    tiles: Floats = np.floor(exact)
    largest_remainders = np.argsort(-(exact - tiles), kind="stable")
    tiles[largest_remainders[: round(-float(tiles.sum()))]] += 1
    return tiles


def _move_tiles(table: Ints, workers: int, tile: int) -> Ints:
    """Evens out workers whose shards are too short to be cut: some tiles or a shard at a time."""
    counts = np.bincount(table[:, 0], table[:, 3] - table[:, 2], minlength=workers)
    rows = iter(table[np.argsort(table[:, 0], kind="stable"), 1:].tolist())
    held = [list(islice(rows, n)) for n in np.bincount(table[:, 0], minlength=workers).tolist()]
    mean = counts.mean()
    while counts.max() - counts.min() > tile:
        high, low = int(counts.argmax()), int(counts.argmin())
        document, start, stop = held[high].pop()
        num_tiles = max(int(min(counts[high] - mean, mean - counts[low]) // tile), 1)
        cut = min(start + num_tiles * tile, stop)
        held[low].append([document, start, cut])
        if cut < stop:
            held[high].append([document, cut, stop])
        counts[high] -= cut - start
        counts[low] += cut - start
    return as_ints([(worker, *row) for worker, rows in enumerate(held) for row in rows])
