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
from dataclasses import replace

import numpy as np

from distca.planning.devices import Devices
from distca.planning.placement import Placement
from distca.planning.placers.head_tail import deal_each_document
from distca.planning.placers.slices import Bins, cut_from_the_tail, deal_slices, net_rooms
from distca.planning.problem import DoesNotFitError, Grain, PricedDocuments, Problem
from distca.planning.schedulers.disaggregated import STRATEGIES, schedule
from distca.planning.spans import Floats, Ints, cumulative
from distca.planning.traffic import forward_traffic

PHI_FIRST, PHI_STEP, PHI_TRIES = 0.7, 1.04, 24  # around the density of the short documents
FEW_DOCUMENTS = 64  # for which dealing out each of them by itself is worth a try
MEDIUM = 0.05  # of a worker's net room: documents above it are dealt one by one
FILL_SLACK = 0.002  # of a mean load: documents are not a fluid
NUM_LACKING = 3  # attempts that are filled up although they lack a little, if none lacks nothing
NEAR_MISS = 3.0  # tolerances above 1, within which a tighter target is worth another search
TARGETS = (1.0, 0.6)  # of the tolerance: placements are tried loosely first, then tightly


def balanced_placement(problem: Problem) -> Placement:
    """The same documents placed anew, tokens per worker equal to one tile.

    Where short documents are too few to fill up with (one document over all workers, say), or
    where dedicated servers take a part anyway, the scheduler has to move tasks as well. Then the
    placement that it moves least for is taken: the nearest miss, documents in order, or every
    document dealt out by itself.
    """
    nearest = _search(problem)
    only_workers = problem.devices.num_ranks == problem.devices.num_workers
    if nearest is not None and nearest[0] <= 1.0 + problem.tolerance and only_workers:
        return nearest[1]
    in_order = Placement.in_order(problem.placement.lengths, problem.placement.num_workers)
    candidates = [in_order] if nearest is None else [in_order, nearest[1]]
    if in_order.num_documents <= FEW_DOCUMENTS:
        dealt = deal_each_document(in_order, in_order.num_workers)
        if np.ptp(dealt.tokens) <= problem.grain.tile:
            candidates.append(dealt)
    return min(candidates, key=lambda candidate: _quality(candidate, problem))


def _search(problem: Problem) -> tuple[float, Placement] | None:
    """The first placement within the bound, or the nearest to it, and its imbalance."""
    cost, workers = problem.cost, problem.devices.workers_only()
    documents = problem.priced_documents(
        lambda q, k, p: cost.forward_ps(q, k, p) + cost.backward_ps(q, k, p)
    )
    total = int(documents.whole_load.sum())
    nearest: tuple[float, Placement] | None = None
    for target in TARGETS:
        capacity = workers.capacity(total, target * problem.tolerance).astype(np.float64)
        for bins in _attempts(documents, capacity, problem.grain):
            placement = Placement.from_shards(documents.lengths, bins.shards, len(capacity))
            imbalance = _imbalance(placement, problem, workers)
            if nearest is None or imbalance < nearest[0]:
                nearest = imbalance, placement
            if imbalance <= 1.0 + problem.tolerance:
                return nearest
        if nearest is None or nearest[0] > 1.0 + NEAR_MISS * problem.tolerance:
            break
    return nearest


def _attempts(documents: PricedDocuments, capacity: Floats, grain: Grain) -> Iterator[Bins]:
    """Filled workers for one phi after the other; last those that lacked least to be fillable."""
    lacking: list[tuple[float, float]] = []
    for phi in _filler_densities(documents, capacity):
        bins, lack = _deal_long(documents, capacity, phi, grain)
        if lack > 0.0:
            lacking.append((lack, phi))
        else:
            yield _fill_up(documents, bins, grain)
    for _, phi in sorted(entry for entry in lacking if entry[0] < np.inf)[:NUM_LACKING]:
        yield _fill_up(documents, _deal_long(documents, capacity, phi, grain)[0], grain)


def _imbalance(placement: Placement, problem: Problem, workers: Devices) -> float:
    """Of every task at home, the larger of forward and backward."""
    worst = 1.0
    for price in (problem.cost.forward_ps, problem.cost.backward_ps):
        loads = problem.priced_documents(price).load(
            placement.document, placement.start, placement.stop
        )
        work = np.zeros(placement.num_workers, np.int64)
        np.add.at(work, placement.worker, loads)
        worst = max(worst, workers.imbalance(work))
    return worst


def _quality(placement: Placement, problem: Problem) -> tuple[bool, float, float]:
    """Once the scheduler has mended it: whether it misses the bound; bytes, worst and in all."""
    problem = replace(problem, placement=placement)
    try:
        tasks = schedule(problem, problem.cost.backward_ps, STRATEGIES[:1])
    except DoesNotFitError:
        return True, np.inf, np.inf
    ranks = problem.devices.num_ranks
    _, work = tasks.work_ps(placement, problem.reach, problem.cost, ranks)
    missed = problem.devices.imbalance(work) > 1.0 + problem.tolerance
    traffic = forward_traffic(tasks, placement, problem.shape, problem.devices.node)
    return missed, traffic.worst, traffic.total


def _filler_densities(documents: PricedDocuments, capacity: Floats) -> Iterator[float]:
    """Guesses of phi, from below the density of the short documents upwards.

    Small phi leaves much room for slices, so few of them; but the fillers must be that light.
    """
    tokens = documents.lengths.sum() / len(capacity)
    phi = 0.0
    for _ in range(4):
        net_room = float(np.median(capacity)) - phi * tokens
        short = documents.whole_load - phi * documents.lengths <= MEDIUM * net_room
        phi = float(documents.whole_load[short].sum() / max(documents.lengths[short].sum(), 1))
    if phi == 0.0:
        return  # no short documents at all
    for step in range(PHI_TRIES):
        yield PHI_FIRST * PHI_STEP**step * phi


def _deal_long(
    documents: PricedDocuments, capacity: Floats, phi: float, grain: Grain
) -> tuple[Bins, float]:
    """Workers with slices and medium documents, and the share of load they lack for the rest."""
    workers = len(capacity)
    tokens = float(documents.lengths.sum()) / workers
    room = float(np.median(capacity)) - phi * tokens
    medium = documents.whole_load - phi * documents.lengths > MEDIUM * room
    bins = Bins.empty(capacity, tokens, short=np.flatnonzero(~medium))
    if room <= 0:
        return bins, np.inf
    slices, port_limit = cut_from_the_tail(
        documents, np.flatnonzero(medium), phi, room, tokens, grain
    )
    deal_slices(documents, slices, bins, phi, port_limit, grain)
    return bins, _lack(documents, bins)


def _fill_up(documents: PricedDocuments, bins: Bins, grain: Grain) -> Bins:
    _deal_short(documents, bins.short, bins)
    _even_tokens(bins, grain)
    return bins


def _lack(documents: PricedDocuments, bins: Bins) -> float:
    """By how much the lightest short documents are too heavy where area per token is least.

    In means of a worker's load; 0 where they fit, from the tightest worker upwards.
    """
    area, tokens = np.asarray(bins.area), np.asarray(bins.tokens)
    lengths, loads = documents.lengths[bins.short], documents.whole_load[bins.short]
    lightest = np.argsort(loads / lengths, kind="stable")
    filled, load = cumulative(lengths[lightest]), cumulative(loads[lightest])
    tightest = np.argsort(area / np.maximum(tokens, 1.0), kind="stable")
    needed = np.interp(np.cumsum(tokens[tightest]), filled, load)
    worst = float(np.max(needed - np.cumsum(area[tightest])))
    lack = worst * len(area) / float(documents.whole_load.sum())
    return lack if lack > FILL_SLACK else 0.0


def _deal_short(documents: PricedDocuments, short: Ints, bins: Bins) -> None:
    """Longest first, to the worker with most area beyond what its other tokens will bring."""
    workers = len(bins.area)
    order = short[np.argsort(-documents.lengths[short], kind="stable")]
    lengths, loads = documents.lengths[order], documents.whole_load[order]
    tokens_left, load_left = lengths.sum() - np.cumsum(lengths), loads.sum() - np.cumsum(loads)
    for first in range(0, len(order), workers):
        chunk = slice(first, min(first + workers, len(order)))
        last = chunk.stop - 1
        density = float(load_left[last] / tokens_left[last]) if tokens_left[last] > 0 else 0.0
        rooms = net_rooms(bins, density)
        emptiest: list[tuple[float, int]] = []  # for documents longer than any worker has tokens
        rows = (order[chunk].tolist(), lengths[chunk].tolist(), loads[chunk].tolist())
        for document, length, load in zip(*rows, strict=True):
            while rooms and bins.tokens[rooms[0][1]] < length:
                heapq.heappop(rooms)
            if rooms:
                room, worker = rooms[0]
                heapq.heapreplace(rooms, (room + load - density * length, worker))
            else:
                if not emptiest:
                    emptiest = [(-tokens, worker) for worker, tokens in enumerate(bins.tokens)]
                    heapq.heapify(emptiest)
                worker = emptiest[0][1]
                heapq.heapreplace(emptiest, (length - bins.tokens[worker], worker))
            bins.put(worker, document, 0, length, load)


def _even_tokens(bins: Bins, grain: Grain) -> None:
    """Moves heads of documents, in whole tiles, until token counts differ by one tile at most."""
    tile, shards = grain.tile, bins.shards
    surplus = -np.asarray(bins.tokens) / tile
    give = np.floor(surplus)
    most_left = np.argsort(-(surplus - give), kind="stable")
    give[most_left[: round(-float(give.sum()))]] += 1  # now they sum to zero
    takers = [[int(-n), w] for w, n in enumerate(give) if n < 0]
    givers = [index for index, shard in enumerate(shards) if give[shard[0]] > 0]
    givers.sort(key=lambda index: shards[index][2] - shards[index][3])  # longest first
    # What is left of a document is at least the minimum, unless there are too few long ones.
    for least in (grain.minimum, 1):
        for index in givers:
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
    if give.max(initial=0.0) > 0:
        _level(bins, tile)


def _level(bins: Bins, tile: int) -> None:
    """For workers whose shards are too short to be cut: one tile, or one whole shard, at a time."""
    workers = len(bins.tokens)
    shards: list[list[tuple[int, int, int]]] = [[] for _ in range(workers)]
    for worker, *span in bins.shards:
        shards[worker].append((span[0], span[1], span[2]))
    counts = [sum(stop - start for _, start, stop in held) for held in shards]
    while max(counts) - min(counts) > tile:
        high, low = counts.index(max(counts)), counts.index(min(counts))
        document, start, stop = shards[high].pop()
        cut = min(start + tile, stop)
        shards[low].append((document, start, cut))
        if cut < stop:
            shards[high].append((document, cut, stop))
        counts[high] -= cut - start
        counts[low] += cut - start
    bins.shards = [(worker, *span) for worker, held in enumerate(shards) for span in held]
