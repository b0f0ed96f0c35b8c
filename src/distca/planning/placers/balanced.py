"""Balanced placement: equal tokens and about equal attention on every worker.

The linear layers do not depend on where a token lives. So a long document is cut from its tail into
slices, each with as much attention as one worker may have, and the workers are filled up with short
documents, which bring tokens but little attention:

1. Guess the *density*: the attention per token of the documents that will fill up the workers.
2. Cut documents from the tail. A slice fills a worker if its *net* load, which is its load less
   density x its tokens, equals the worker's capacity less density x the worker's tokens.
3. Put slices and medium documents, the largest net load first, on the worker with the most net
   headroom.
4. Check whether the short documents can fill up the workers; if not, try another density.
5. Put the short documents, the densest first, on the worker with the most headroom beyond what its
   remaining tokens are expected to bring.
6. Even out the token counts to one tile by moving heads of documents, which have little attention.

A slice that ends at position m needs m keys, wherever they live, so a document with slices that end
at m_r costs sum(m_r) - length keys. Cutting from the tail makes this sum small (docs/planning.md).
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np

from distca.planning.costs.base import TaskCost
from distca.planning.devices import Devices
from distca.planning.placement import Placement
from distca.planning.placers.filling import fill_up
from distca.planning.placers.head_tail import deal_each_document
from distca.planning.placers.slices import DealtShards, SliceLimits, Slicer, deal_slices
from distca.planning.problem import CostFunction, DocumentLoads, DoesNotFitError, Grain, Problem
from distca.planning.schedulers.disaggregated import SEARCH_ORDERS, schedule
from distca.planning.spans import Floats, Ints, cumulative
from distca.planning.traffic import traffic

# docs/planning.md ("What was tried") has the figures behind these constants.
FIRST_DENSITY = 0.7  # relative to the density of the short documents; the first that works is used
DENSITY_STEP = 1.04  # from one density to the next
NUM_DENSITIES = 24  # up to 1.7 x the density of the short documents
MEDIUM = 0.05  # share of a worker's net headroom above which documents are put like slices
FILL_SLACK = 0.002  # share of the mean load that may be missing: short documents are not a fluid
STRIDE = 4  # between the densities that are looked at first
NUM_ABOVE = 8  # densities that are tried from the first one on that works
NUM_NO_CLOSER = 3  # attempts in a row that come no closer to the bound, after which no more follow
CLOSER = 0.9  # an attempt comes closer if its imbalance - 1 falls to this share or less
MUCH_MISSING = 1.0  # mean loads that are missing at a density above which none will work again
NUM_MISSING = 3  # densities that are tried although headroom is missing, those that miss least
NEAR_MISS = 4.0  # in tolerances: an imbalance up to which a search with a tighter target may help
TARGETS = (1.0, 0.6)  # tolerances that are aimed at, relative to the given one: loose, then tight
FEW_DOCUMENTS = 64  # up to which dealing each document over all workers is tried as well


def balanced_placement(problem: Problem) -> Placement:
    """Places the documents of a problem such that tokens per worker differ by one tile at most.

    If there are too few short documents to fill up the workers, or if dedicated servers compute a
    part, the scheduler has to move tasks as well. Then the best of several placements for the
    scheduler is returned: the most even one found, documents in order unless that one is almost
    even, and each document dealt over all workers.
    """
    nearest = _search(problem)
    only_workers = problem.devices.num_ranks == problem.devices.num_workers
    candidates = [] if nearest is None else [nearest.placement]
    if nearest is not None and nearest.imbalance <= 1.0 + problem.tolerance and only_workers:
        return nearest.placement
    in_order = Placement.in_order(problem.placement.lengths, problem.placement.num_workers)
    if nearest is None or not only_workers or not nearest.almost_even(problem):
        candidates.append(in_order)
    if in_order.num_documents <= FEW_DOCUMENTS:
        over_all = deal_each_document(in_order, in_order.num_workers)
        if np.ptp(over_all.tokens) <= problem.grain.tile:
            candidates.append(over_all)
    if len(candidates) == 1:
        return candidates[0]
    return min(candidates, key=lambda candidate: _quality(candidate, problem))


class _Attempt(NamedTuple):
    """A placement for one density. Sorts by imbalance."""

    imbalance: float  # the larger of both directions
    forward_is_worse: bool
    density: int  # its index
    table: Ints  # of shards, as in ``filling``
    lengths: Ints
    num_workers: int

    @property
    def placement(self) -> Placement:
        return Placement.from_shards(self.lengths, self.table, self.num_workers)

    def almost_even(self, problem: Problem) -> bool:
        return self.imbalance <= 1.0 + NEAR_MISS * problem.tolerance


def _search(problem: Problem) -> _Attempt | None:
    """Returns the first placement within the bound, or the most even one."""
    workers = problem.devices.workers_only()
    nearest: _Attempt | None = None
    for target in TARGETS:
        around = None if nearest is None else nearest.density
        cost_ps: CostFunction = problem.cost.sum_ps  # in which backward weighs more
        if nearest is not None and nearest.forward_is_worse:
            cost_ps = _equal_weights(problem)
        documents = problem.document_loads(cost_ps)
        total = int(documents.whole.sum())
        capacity = workers.capacity(total, target * problem.tolerance).astype(np.float64)
        no_closer = 0  # attempts in a row
        for density, dealt in _deals(documents, capacity, problem.grain, around):
            table = fill_up(documents, dealt, problem.grain)
            forward, backward = _imbalances(table, problem, workers)
            imbalance = max(forward, backward)
            no_closer += 1
            if nearest is None or imbalance < nearest.imbalance:
                if nearest is None or imbalance - 1.0 < CLOSER * (nearest.imbalance - 1.0):
                    no_closer = 0
                nearest = _Attempt(
                    imbalance, forward > backward, density, table, documents.lengths, len(capacity)
                )
            if imbalance <= 1.0 + problem.tolerance:
                return nearest
            if no_closer == NUM_NO_CLOSER:
                break
        if nearest is None or not nearest.almost_even(problem):
            break
    return nearest


def _equal_weights(problem: Problem) -> CostFunction:
    """Returns costs in which both directions weigh the same, because each has its own bound."""
    forward, backward = problem.cost.forward.ps, problem.cost.backward.ps
    total_forward, total_backward = (
        float(problem.document_loads(cost).whole.sum()) for cost in (forward, backward)
    )
    weight = total_backward / max(total_forward, 1.0)

    def cost_ps(queries: Ints, keys: Ints, pairs: Ints) -> Ints:
        weighted: Ints = np.rint(weight * forward(queries, keys, pairs)).astype(np.int64)
        return weighted + backward(queries, keys, pairs)

    return cost_ps


def _deals(
    documents: DocumentLoads, capacity: Floats, grain: Grain, around: int | None
) -> Iterator[tuple[int, DealtShards]]:
    """Yields long documents on workers for densities at which the headroom suffices, in ascending
    order, and at last for those at which the least headroom is missing.

    The headroom that is missing falls with the density and then rises again. So every ``STRIDE``-th
    density is looked at first, and then the neighbors of the first one that works, or of the one
    that comes closest.

    around: the index of a density of which only the neighbors are looked at.
    """
    densities = list(_densities(documents, capacity))

    @cache
    def deal(index: int) -> tuple[DealtShards, float]:
        return _deal_long(documents, capacity, densities[index], grain)

    def missing(index: int) -> float:
        return deal(index)[1]

    indices = range(len(densities))
    if around is None:
        coarse = indices[::STRIDE]
        works = next((index for index in coarse if missing(index) == 0.0), None)
        center = min(coarse, key=missing, default=0) if works is None else works
        above = STRIDE if works is None else NUM_ABOVE
        near = indices[max(center - STRIDE + 1, 0) : center + above]
    else:
        near = indices[max(around - 1, 0) : around + STRIDE]
    num_worked = 0
    not_enough = []
    for index in near:
        if missing(index) == 0.0:
            yield index, deal(index)[0]
            num_worked += 1
        elif missing(index) < np.inf:
            not_enough.append(index)
            if num_worked and missing(index) > MUCH_MISSING:
                break
    for index in sorted(not_enough, key=missing)[:NUM_MISSING]:
        yield index, deal(index)[0]


def _imbalances(table: Ints, problem: Problem, workers: Devices) -> tuple[float, float]:
    """Returns the forward and the backward imbalance with every task at home."""
    worker, *shards = table.T

    def imbalance(cost: TaskCost) -> float:
        load = np.zeros(workers.num_ranks, np.int64)
        np.add.at(load, worker, problem.document_loads(cost.ps).load(*shards))
        return workers.imbalance(load)

    return imbalance(problem.cost.forward), imbalance(problem.cost.backward)


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
    headroom, tokens = dealt.headroom, dealt.tokens_left
    lengths, loads = documents.lengths[dealt.short], documents.whole[dealt.short]
    lightest = np.argsort(loads / lengths, kind="stable")
    filled, load = cumulative(lengths[lightest]), cumulative(loads[lightest])
    tightest = np.argsort(headroom / np.maximum(tokens, 1.0), kind="stable")
    needed = np.interp(np.cumsum(tokens[tightest]), filled, load)
    worst = float(np.max(needed - np.cumsum(headroom[tightest])))
    missing = worst * len(headroom) / float(documents.whole.sum())
    return missing if missing > FILL_SLACK else 0.0
