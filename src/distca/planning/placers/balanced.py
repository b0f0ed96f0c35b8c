"""Balanced placement: equal tokens and about equal attention on every worker.

The linear layers do not depend on where a token lives. So a long document is cut from its tail into
slices, each with as much attention as one worker may have, and the workers are filled up with short
documents, which bring tokens but little attention:

1. Guess the *density*: the attention per token of the documents that will fill up the workers.
2. Cut documents from the tail. A slice fills a worker if its *net* load, which is its load less
   density x its tokens, equals the worker's capacity less density x the worker's tokens.
3. Put slices and medium documents, the largest net load first, on the worker with the most net
   headroom.
4. Check whether the short documents can fill up the workers; if not, try the next density.
5. Put the short documents, the longest first, on the worker with the most headroom beyond what its
   remaining tokens are expected to bring.
6. Even out the token counts to one tile by moving heads of documents, which have little attention.

A slice that ends at position m needs m keys, wherever they live, so a document with slices that end
at m_r costs sum(m_r) - length keys. Cutting from the tail makes this sum small (docs/planning.md).
"""

import heapq
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from distca.planning.devices import Devices
from distca.planning.placement import Placement, Shard
from distca.planning.placers.head_tail import deal_each_document
from distca.planning.placers.slices import DealtShards, SliceLimits, Slicer, deal_slices
from distca.planning.problem import DocumentLoads, DoesNotFitError, Grain, Problem
from distca.planning.schedulers.disaggregated import SEARCH_ORDERS, schedule
from distca.planning.spans import Floats, cumulative
from distca.planning.tasks import Tasks
from distca.planning.traffic import traffic

# docs/planning.md ("What was tried") has the figures behind these constants.
FIRST_DENSITY = 0.7  # relative to the density of the short documents; the first that works is used
DENSITY_STEP = 1.04  # from one density to the next
NUM_DENSITIES = 24  # up to 1.7 x the density of the short documents
MEDIUM = 0.05  # share of a worker's net headroom above which documents are put like slices
FILL_SLACK = 0.002  # share of the mean load that may be missing: short documents are not a fluid
NUM_MISSING = 3  # densities that are tried although headroom is missing, those that miss least
NEAR_MISS = 3.0  # in tolerances: an imbalance up to which a search with a tighter target may help
TARGETS = (1.0, 0.6)  # tolerances that are aimed at, relative to the given one: loose, then tight
FEW_DOCUMENTS = 64  # up to which dealing each document over all workers is tried as well


def balanced_placement(problem: Problem) -> Placement:
    """Places the documents of a problem such that tokens per worker differ by one tile at most.

    If there are too few short documents to fill up the workers, or if dedicated servers compute a
    part, the scheduler has to move tasks as well. Then the best of several placements for the
    scheduler is returned: the most even one found, documents in order, and each document dealt over
    all workers.
    """
    nearest = _search(problem)
    only_workers = problem.devices.num_ranks == problem.devices.num_workers
    if nearest is not None and nearest[0] <= 1.0 + problem.tolerance and only_workers:
        return nearest[1]
    in_order = Placement.in_order(problem.placement.lengths, problem.placement.num_workers)
    candidates = [in_order] if nearest is None else [in_order, nearest[1]]
    if in_order.num_documents <= FEW_DOCUMENTS:
        over_all = deal_each_document(in_order, in_order.num_workers)
        if np.ptp(over_all.tokens) <= problem.grain.tile:
            candidates.append(over_all)
    return min(candidates, key=lambda candidate: _quality(candidate, problem))


def _search(problem: Problem) -> tuple[float, Placement] | None:
    """Returns the first placement within the bound, or the most even one, and its imbalance."""
    workers = problem.devices.workers_only()
    documents = problem.document_loads(problem.cost.sum_ps)
    total = int(documents.whole.sum())
    nearest: tuple[float, Placement] | None = None
    for target in TARGETS:
        capacity = workers.capacity(total, target * problem.tolerance).astype(np.float64)
        for dealt in _attempts(documents, capacity, problem.grain):
            _deal_short(documents, dealt)
            _even_tokens(dealt, problem.grain)
            placement = Placement.from_shards(documents.lengths, dealt.shards, len(capacity))
            imbalance = _imbalance(placement, problem, workers)
            if nearest is None or imbalance < nearest[0]:
                nearest = imbalance, placement
            if imbalance <= 1.0 + problem.tolerance:
                return nearest
        if nearest is None or nearest[0] > 1.0 + NEAR_MISS * problem.tolerance:
            break
    return nearest


def _attempts(documents: DocumentLoads, capacity: Floats, grain: Grain) -> Iterator[DealtShards]:
    """Yields long documents on workers for each density, at last where a little headroom misses."""
    not_enough: list[tuple[float, float]] = []
    for density in _densities(documents, capacity):
        dealt, missing = _deal_long(documents, capacity, density, grain)
        if missing > 0.0:
            not_enough.append((missing, density))
        else:
            yield dealt
    for _, density in sorted(entry for entry in not_enough if entry[0] < np.inf)[:NUM_MISSING]:
        yield _deal_long(documents, capacity, density, grain)[0]


def _imbalance(placement: Placement, problem: Problem, workers: Devices) -> float:
    """Returns the imbalance with every task at home, the larger of forward and backward."""
    tasks = Tasks.at_home(placement, problem.reach)
    return max(
        workers.imbalance(tasks.load_ps(placement, problem.reach, cost, placement.num_workers))
        for cost in (problem.cost.forward, problem.cost.backward)
    )


def _quality(placement: Placement, problem: Problem) -> tuple[bool, float, float]:
    """Returns, after scheduling: whether the bound is missed; peak traffic; total traffic."""
    problem = replace(problem, placement=placement)
    try:
        tasks = schedule(problem, problem.cost.backward, SEARCH_ORDERS[:1])
    except DoesNotFitError:
        return True, np.inf, np.inf
    devices = problem.devices
    load = tasks.load_ps(placement, problem.reach, problem.cost.backward, devices.num_ranks)
    missed = devices.imbalance(load) > 1.0 + problem.tolerance
    moved = traffic(tasks, placement, problem.shape, devices.node)
    return missed, moved.worst, moved.total


def _densities(documents: DocumentLoads, capacity: Floats) -> Iterator[float]:
    """Yields guesses of the density in ascending order.

    With a small density, slices are large and few; but then the short documents must be that light.
    """
    density = 0.0
    # Which documents are short depends on the density: a fixed point after a few rounds.
    for _ in range(4):
        net_load = documents.whole - density * documents.lengths
        short = net_load <= MEDIUM * _net_headroom(documents, capacity, density)
        short_tokens = max(documents.lengths[short].sum(), 1)
        density = float(documents.whole[short].sum() / short_tokens)
    if density == 0.0:
        return  # there are no short documents
    for step in range(NUM_DENSITIES):
        yield FIRST_DENSITY * DENSITY_STEP**step * density


def _net_headroom(documents: DocumentLoads, capacity: Floats, density: float) -> float:
    """Returns what tokens of this density leave of the capacity of a worker."""
    return float(np.median(capacity) - density * (documents.lengths.sum() / len(capacity)))


def _deal_long(
    documents: DocumentLoads, capacity: Floats, density: float, grain: Grain
) -> tuple[DealtShards, float]:
    """Puts slices and medium documents on workers; also returns the headroom that is missing."""
    tokens = float(documents.lengths.sum()) / len(capacity)
    net_headroom = _net_headroom(documents, capacity, density)
    medium = documents.whole - density * documents.lengths > MEDIUM * net_headroom
    dealt = DealtShards.none(capacity, tokens, short=np.flatnonzero(~medium))
    if net_headroom <= 0:
        return dealt, np.inf
    slicer, limits = Slicer(documents, density, grain), SliceLimits(net_headroom, tokens)
    slices, traffic_limit = slicer.cut_from_the_tail(np.flatnonzero(medium), limits)
    deal_slices(slicer, slices, dealt, traffic_limit)
    return dealt, _missing_headroom(documents, dealt)


def _missing_headroom(documents: DocumentLoads, dealt: DealtShards) -> float:
    """Returns by how much short documents are too heavy, in mean loads; 0 if they fit.

    The workers with the least headroom per token get the documents with the least load per token.
    At no worker of this order may the sum of loads exceed the sum of headrooms.
    """
    headroom, tokens = np.asarray(dealt.headroom), np.asarray(dealt.tokens_left)
    lengths, loads = documents.lengths[dealt.short], documents.whole[dealt.short]
    lightest = np.argsort(loads / lengths, kind="stable")
    filled, load = cumulative(lengths[lightest]), cumulative(loads[lightest])
    tightest = np.argsort(headroom / np.maximum(tokens, 1.0), kind="stable")
    needed = np.interp(np.cumsum(tokens[tightest]), filled, load)
    worst = float(np.max(needed - np.cumsum(headroom[tightest])))
    missing = worst * len(headroom) / float(documents.whole.sum())
    return missing if missing > FILL_SLACK else 0.0


def _deal_short(documents: DocumentLoads, dealt: DealtShards) -> None:
    """Puts short documents, the longest first, on the worker with the most net headroom.

    The density is that of the documents still to come. It is computed again for each round of as
    many documents as there are workers.
    """
    workers = len(dealt.headroom)
    order = dealt.short[np.argsort(-documents.lengths[dealt.short], kind="stable")]
    lengths, loads = documents.lengths[order], documents.whole[order]
    tokens_after, load_after = lengths.sum() - np.cumsum(lengths), loads.sum() - np.cumsum(loads)
    for first in range(0, len(order), workers):
        chunk = slice(first, min(first + workers, len(order)))
        last = chunk.stop - 1
        density = float(load_after[last] / tokens_after[last]) if tokens_after[last] > 0 else 0.0
        by_headroom = dealt.net_headrooms(density)
        rows = (order[chunk].tolist(), lengths[chunk].tolist(), loads[chunk].tolist())
        for document, length, load in zip(*rows, strict=True):
            while by_headroom and dealt.tokens_left[by_headroom[0][1]] < length:
                heapq.heappop(by_headroom)
            if by_headroom:
                negative, worker = by_headroom[0]
                heapq.heapreplace(by_headroom, (negative + load - density * length, worker))
            else:  # the document is longer than what any worker has left
                worker = int(np.argmax(dealt.tokens_left))
            dealt.put(Shard(worker, document, 0, length), load)


def _even_tokens(dealt: DealtShards, grain: Grain) -> None:
    """Moves heads of documents, in whole tiles, until token counts differ by one tile at most."""
    surplus = _surplus_tiles(dealt, grain.tile)
    takers = [[int(-tiles), worker] for worker, tiles in enumerate(surplus) if tiles < 0]
    givers = [index for index, shard in enumerate(dealt.shards) if surplus[shard.worker] > 0]
    givers.sort(key=lambda index: dealt.shards[index].start - dealt.shards[index].stop)
    # Heads of whole documents are cut first, such that at least the minimum remains of a document.
    # Then any shard is cut that starts at a tile.
    for minimum in (grain.min_shard, 1):
        for index in givers:
            worker, document, start, stop = dealt.shards[index]
            available = (stop - start - minimum) // grain.tile if start % grain.tile == 0 else 0
            count = int(min(surplus[worker], available))
            if count <= 0 or (start > 0 and minimum > 1):
                continue
            surplus[worker] -= count
            while count > 0:
                taker = takers[-1]
                moved = min(count, taker[0])
                cut = start + moved * grain.tile
                dealt.shards.append(Shard(taker[1], document, start, cut))
                start, count, taker[0] = cut, count - moved, taker[0] - moved
                if taker[0] == 0:
                    takers.pop()
            dealt.shards[index] = Shard(worker, document, start, stop)
    if surplus.max(initial=0.0) > 0:
        _move_single_tiles(dealt, grain.tile)


def _surplus_tiles(dealt: DealtShards, tile: int) -> Floats:
    """[workers] Returns whole numbers of tiles that workers should give away; they sum to zero."""
    exact = -np.asarray(dealt.tokens_left) / tile
    tiles: Floats = np.floor(exact)
    largest_remainders = np.argsort(-(exact - tiles), kind="stable")
    tiles[largest_remainders[: round(-float(tiles.sum()))]] += 1
    return tiles


def _move_single_tiles(dealt: DealtShards, tile: int) -> None:
    """Evens out workers whose shards are too short to be cut: one tile or shard at a time."""
    held: list[list[Shard]] = [[] for _ in dealt.tokens_left]
    for shard in dealt.shards:
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
    dealt.shards = [shard for shards in held for shard in shards]
