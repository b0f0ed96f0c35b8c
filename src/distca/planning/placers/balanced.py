"""Balanced placement: equal tokens and about equal attention on every worker.

The linear layers do not depend on where a token lives. So a long document is cut from its tail into
slices, each with as much attention as one worker may have, and the workers are filled up with short
documents, which bring tokens but little attention:

1. Guess the *density*: the attention per token of the documents that will fill up the workers.
2. Cut documents from the tail. A slice fills a worker if its *net* load, which is its load less
   density x its tokens, equals the worker's capacity less density x the worker's tokens.
3. Put slices and medium documents, the largest net load first, on the worker with the most net
   headroom.
4. Put the short documents, the densest first, on the worker with the most headroom beyond what its
   remaining tokens are expected to bring.
5. Even out the token counts to one tile by moving heads of documents, which have little attention.
6. If workers are above their capacity, try a higher density, as long as this lowers their surplus.
7. If a worker then sends much more than any receives, let such workers swap slices after step 3
   (``senders``), and fill up the workers again. Keep the result if it lowers the peak.

A slice that ends at position m needs m keys, wherever they live, so a document with slices that end
at m_r costs sum(m_r) - length keys. Cutting from the tail makes this sum small (docs/planning.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from distca.planning.devices import UNLIMITED
from distca.planning.placement import Placement
from distca.planning.placers.attempts import Attempt, Measure
from distca.planning.placers.candidates import Placed, best_of
from distca.planning.placers.dealing import DealtShards, LongDocuments, deal_slices
from distca.planning.placers.filling import fill_up
from distca.planning.placers.head_tail import deal_each_document
from distca.planning.placers.neighbors import gather_in_nodes
from distca.planning.placers.slices import SliceLimits, Slicer
from distca.planning.problem import DocumentLoads, Grain, Problem
from distca.planning.schedulers.budget import MANY_RANKS, OF_A_FALLBACK, SLICES_A_REQUEST
from distca.planning.spans import Floats

# docs/planning-experiments.md has the figures behind these constants.
FIRST_DENSITY = 0.7  # relative to the density of the short documents; the first that works is used
DENSITY_STEP = 1.04  # from one density to the next
NUM_DENSITIES = 24  # up to 1.7 x the density of the short documents
MEDIUM = 0.05  # share of a worker's net headroom above which documents are put like slices
MAX_STEPS = 8  # of the density at once
SURPLUS_OF_STEP = 0.0025  # by which the surplus falls with each step, about
AHEAD = 0.5  # tolerances by which forward may exceed backward if backward weighs more
FEW_TASKS = 0.002  # surplus up to which moving tasks costs less than another search saves
WORTH_A_SEARCH = 0.18  # share of the bytes, those of tasks, up to which no search saves enough
NEAR_MISS = 0.02  # surplus up to which a search with a tighter target may help
TARGETS = (1.0, 0.6)  # tolerances that are aimed at, relative to the given one: loose, then tight
MANY_SLICES = 2000  # dealt on more than MANY_RANKS, after which densities have to do much better
MOST_SLICES = 3000  # likewise, after which no other density is tried,
MOST_SLICES_WITH_PREFIXES = 1000  # and where documents share some, which gains little by another
SENDERS_AHEAD = 1.2  # times what any worker receives, above which senders are evened out,
SENT_OFTEN = 1.5  # if a worker sends its tokens so often
LOWER_PEAK = 0.8  # share of the peak to which that must lower it
MORE_BYTES = 1.75  # times those of the placement without swaps: tasks may have to move then
FEW_DOCUMENTS = 64  # up to which other placements are tried as well


def balanced_placement(problem: Problem) -> Placed:
    """Places the documents of a problem such that tokens per worker differ by one tile at most.

    If there are too few short documents to fill up the workers, or if dedicated servers compute a
    part, the scheduler has to move tasks as well. With few documents, the best of several
    placements for the scheduler is returned then: the one found, documents in order, or, where
    these do not suffice, each document dealt over all workers.
    """
    lengths, num_workers = problem.placement.lengths, problem.placement.num_workers
    prefixes, two_way = problem.placement.prefixes, problem.placement.two_way
    # If no worker serves, all tasks move, and documents in order have the fewest.
    measure = Measure(problem)
    nearest = _search(measure) if problem.devices.workers_serve else None
    taken = measure.slices // SLICES_A_REQUEST
    only_workers = problem.devices.num_ranks == problem.devices.num_workers
    candidates = []
    if nearest is not None:
        candidates = [gather_in_nodes(_placement(nearest, problem), problem)]
        if nearest.surplus == 0.0 and only_workers and not prefixes.exist:
            return Placed(candidates[0], taken=taken)
    in_order = Placement.in_order(lengths, num_workers, prefixes, two_way)
    if prefixes.exist:  # in order, documents that share a prefix are near each other
        return best_of([*candidates, in_order], problem, taken=taken)
    few = in_order.num_documents <= FEW_DOCUMENTS
    if few or nearest is None or not only_workers:
        candidates.append(in_order)
    dealt = _deal_over_all(in_order, problem) if few else None
    if len(candidates) == 1 and dealt is None:
        return Placed(candidates[0], taken=taken)
    if dealt is not None:
        taken += OF_A_FALLBACK
    return best_of(candidates, problem, fallback=dealt, taken=taken)


def _deal_over_all(in_order: Placement, problem: Problem) -> Placement | None:
    """Deals each document over all workers; returns None if their tokens are not equal then."""
    dealt = deal_each_document(in_order, in_order.num_workers)
    return dealt if np.ptp(dealt.tokens) <= problem.grain.tile else None


def _search(measure: Measure) -> Attempt | None:
    """Returns the best placement for any density, with slices swapped if that lowers the peak."""
    plain = _search_densities(measure)
    if plain is None or not _sends_too_much(plain, measure.problem):
        return plain
    even = _fill_up(measure, plain.density, plain.long.with_even_senders())
    is_lower = even.peak_bytes <= LOWER_PEAK * plain.peak_bytes
    is_cheap = even.moved_bytes <= MORE_BYTES * plain.moved_bytes
    return even if is_lower and is_cheap else plain


def _sends_too_much(attempt: Attempt, problem: Problem) -> bool:
    """Returns whether a worker sends much more than any receives, and its tokens several times."""
    tokens = int(problem.placement.lengths.sum()) / problem.placement.num_workers
    least = max(
        SENDERS_AHEAD * attempt.received_bytes, SENT_OFTEN * problem.shape.kv_bytes * tokens
    )
    return attempt.peak_bytes > least


def _placement(attempt: Attempt, problem: Problem) -> Placement:
    of = problem.placement
    return Placement.from_shards(of.lengths, attempt.table, of.num_workers, of.prefixes, of.two_way)


@dataclass(frozen=True, eq=False)
class _Loads:
    """What documents cost, what workers may take of it, and the densities to try."""

    documents: DocumentLoads
    capacity: Floats  # [workers]

    @classmethod
    def of(cls, problem: Problem, forward_weight: float, target: float) -> _Loads:
        documents = problem.document_loads(problem.cost.both(forward_weight).ps)
        total, tolerance = int(documents.whole.sum()), target * problem.tolerance
        capacity = problem.devices.workers_only.capacity(total, tolerance).astype(np.float64)
        return cls(documents, capacity)

    @cached_property
    def tokens(self) -> float:
        """Those of a worker."""
        return float(self.documents.tokens.sum()) / len(self.capacity)

    @cached_property
    def _median_capacity(self) -> float:
        return float(np.median(self.capacity))

    def net_headroom(self, density: float) -> float:
        """Returns what tokens of this density leave of the capacity of a worker."""
        return self._median_capacity - density * self.tokens

    @cached_property
    def densities(self) -> list[float]:
        """Guesses of the density in ascending order, which leave workers some net headroom.

        With a small density, slices are large and few; but then the short documents must be that
        light.
        """
        documents, density = self.documents, 0.0
        # Which documents are short depends on the density: a fixed point after a few rounds.
        for _ in range(4):
            net_load = documents.whole - density * documents.tokens
            short = net_load <= MEDIUM * self.net_headroom(density)
            short_tokens = max(documents.tokens[short].sum(), 1)
            density = float(documents.whole[short].sum() / short_tokens)
        guesses = [FIRST_DENSITY * DENSITY_STEP**step * density for step in range(NUM_DENSITIES)]
        return [guess for guess in guesses if self.net_headroom(guess) > 0 < guess]


def _search_densities(measure: Measure) -> Attempt | None:
    """Returns the first placement within the bound, or the one that moves the fewest bytes.

    The tight target is of no use beside dedicated servers, to which tasks have to move anyway. On
    many ranks, the search ends once many slices have been dealt.
    """
    problem = measure.problem
    only_workers = problem.devices.num_ranks == problem.devices.num_workers
    most_ahead = AHEAD * problem.tolerance
    nearest: Attempt | None = None
    for target in TARGETS if only_workers else TARGETS[:1]:
        weight = 1.0  # backward costs more
        if nearest is not None and nearest.ahead > 0:
            weight = _equal_weight(problem)
        loads = _Loads.of(problem, weight, target)
        if nearest is None:
            attempts = _ascend(measure, loads, 0, most_ahead)
        else:
            attempts = _ascend(measure, loads, nearest.density, np.inf)
        known = [] if nearest is None else [nearest]
        nearest = min([*known, *attempts], key=lambda attempt: attempt.quality, default=None)
        if nearest is None or nearest.surplus > NEAR_MISS:
            break
        few_tasks = nearest.surplus <= FEW_TASKS or nearest.task_share <= WORTH_A_SEARCH
        if few_tasks and nearest.ahead <= most_ahead:
            break
    return nearest


def _ascend(measure: Measure, loads: _Loads, index: int, most_ahead: float) -> list[Attempt]:
    """Tries densities from an index on, as long as the surplus falls.

    most_ahead: by how much forward may be ahead; with more, no density will meet its bound.
    """
    many = measure.problem.devices.num_ranks > MANY_RANKS
    most_slices = UNLIMITED
    if many:
        shared = measure.problem.placement.prefixes.exist
        most_slices = MOST_SLICES_WITH_PREFIXES if shared else MOST_SLICES
    attempts: list[Attempt] = []
    steps = 1
    while index < len(loads.densities) and measure.slices < most_slices:
        here = _attempt(measure, loads, index)
        before = attempts[-1] if attempts else None
        attempts.append(here)
        # Where the cuts are about the same as before, only a larger step may change them.
        same = before is not None and here.is_like(before)
        enough_tried = many and measure.slices >= MANY_SLICES
        no_closer = before is not None and not same and not here.is_closer(before, enough_tried)
        no_use = here.surplus <= NEAR_MISS and here.ahead > most_ahead
        few_tasks = many and here.task_share <= WORTH_A_SEARCH
        if here.is_enough or no_closer or no_use or few_tasks:
            break
        steps = 2 * steps if same else min(max(int(here.surplus / SURPLUS_OF_STEP), 1), MAX_STEPS)
        index += steps
    return attempts


def _attempt(measure: Measure, loads: _Loads, index: int) -> Attempt:
    """Places all documents with one of the densities."""
    return _fill_up(
        measure, index, _deal_long(loads, loads.densities[index], measure.problem.grain)
    )


def _fill_up(measure: Measure, index: int, long: LongDocuments) -> Attempt:
    """Fills up the workers with short documents."""
    return measure(index, long, fill_up(long.documents, long.dealt(), measure.problem.grain))


def _equal_weight(problem: Problem) -> float:
    """Returns the weight with which forward counts as much as backward: each has its own bound."""
    forward, backward = (
        float(problem.document_loads(cost.ps).whole.sum())
        for cost in (problem.cost.forward, problem.cost.backward)
    )
    return backward / max(forward, 1.0)


def _deal_long(loads: _Loads, density: float, grain: Grain) -> LongDocuments:
    """Puts slices and medium documents on workers."""
    documents, capacity, tokens = loads.documents, loads.capacity, loads.tokens
    net_headroom = loads.net_headroom(density)
    medium = documents.whole - density * documents.tokens > MEDIUM * net_headroom
    slicer, limits = Slicer(documents, density, grain), SliceLimits(net_headroom, tokens)
    slices, traffic_limit = slicer.cut_from_the_tail(np.flatnonzero(medium), limits)
    none = DealtShards.none(capacity, tokens, short=~medium)
    worker, slices = deal_slices(slicer, slices, none, traffic_limit)
    return LongDocuments(documents, capacity, tokens, ~medium, worker, slices, traffic_limit)
