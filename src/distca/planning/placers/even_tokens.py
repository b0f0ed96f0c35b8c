"""Step 6 of balanced placement: token counts are evened out to one tile."""

from __future__ import annotations

import numpy as np

from distca.planning.placement import Shard
from distca.planning.placers.slices import Bins
from distca.planning.problem import Grain
from distca.planning.spans import Floats


def even_tokens(bins: Bins, grain: Grain) -> None:
    """Moves heads of documents, in whole tiles, until token counts differ by one tile at most."""
    surplus = _surplus_tiles(bins, grain.tile)
    takers = [[int(-tiles), worker] for worker, tiles in enumerate(surplus) if tiles < 0]
    givers = [index for index, shard in enumerate(bins.shards) if surplus[shard.worker] > 0]
    givers.sort(key=lambda index: bins.shards[index].start - bins.shards[index].stop)
    # Heads of whole documents are cut first, such that at least the minimum remains of a document.
    # Then any shard is cut that starts at a tile.
    for minimum in (grain.minimum, 1):
        for index in givers:
            worker, document, start, stop = bins.shards[index]
            available = (stop - start - minimum) // grain.tile if start % grain.tile == 0 else 0
            count = int(min(surplus[worker], available))
            if count <= 0 or (start > 0 and minimum > 1):
                continue
            surplus[worker] -= count
            while count > 0:
                taker = takers[-1]
                moved = min(count, taker[0])
                cut = start + moved * grain.tile
                bins.shards.append(Shard(taker[1], document, start, cut))
                start, count, taker[0] = cut, count - moved, taker[0] - moved
                if taker[0] == 0:
                    takers.pop()
            bins.shards[index] = Shard(worker, document, start, stop)
    if surplus.max(initial=0.0) > 0:
        _move_single_tiles(bins, grain.tile)


def _surplus_tiles(bins: Bins, tile: int) -> Floats:
    """[workers] Returns whole numbers of tiles that workers should give away; they sum to zero."""
    exact = -np.asarray(bins.tokens_left) / tile
    tiles: Floats = np.floor(exact)
    largest_remainders = np.argsort(-(exact - tiles), kind="stable")
    tiles[largest_remainders[: round(-float(tiles.sum()))]] += 1
    return tiles


def _move_single_tiles(bins: Bins, tile: int) -> None:
    """Evens out workers whose shards are too short to be cut: one tile or shard at a time."""
    held: list[list[Shard]] = [[] for _ in bins.tokens_left]
    for shard in bins.shards:
        held[shard.worker].append(shard)
    counts = [sum(shard.stop - shard.start for shard in shards) for shards in held]
    while max(counts) - min(counts) > tile:
        high, low = counts.index(max(counts)), counts.index(min(counts))
        shard = held[high].pop()
        cut = min(shard.start + tile, shard.stop)
        held[low].append(shard._replace(worker=low, stop=cut))
        if cut < shard.stop:
            held[high].append(shard._replace(start=cut))
        counts[high] -= cut - shard.start
        counts[low] += cut - shard.start
    bins.shards = [shard for shards in held for shard in shards]
