"""Placements that are compared by what the scheduler makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from distca.planning.devices import UNLIMITED
from distca.planning.placement import Placement
from distca.planning.problem import DoesNotFitError, Problem
from distca.planning.schedulers.budget import MANY_RANKS
from distca.planning.schedulers.disaggregated import BegunSchedule, begin_backward
from distca.planning.schedulers.orders import TooMuchTrafficError
from distca.planning.tasks import Tasks
from distca.planning.traffic import traffic

_Quality = tuple[float, float, float]  # imbalance above the bound; peak and total traffic
_WORST: _Quality = (np.inf, np.inf, np.inf)


@dataclass(frozen=True, eq=False)
class Placed:
    """A placement, and its schedule as far as the placer had to make it.

    begun: of the placer's own problem. A plan of another one, such as under another mask, does not
        use it.
    """

    placement: Placement
    begun: BegunSchedule | None = None


def best_of(
    candidates: Sequence[Placement], problem: Problem, fallback: Placement | None = None
) -> Placed:
    """Returns the placement with the best quality after scheduling.

    Where one misses the bound, others with a larger surplus would miss it by more. On many ranks,
    the first that meets it is taken: others are as good on average, and take time.

    fallback: one with many shards, each of which takes time. It is scheduled only if no candidate
        meets the bound, or if its workers serve, have no larger surplus than those of the best
        candidate, and fetch less than its peak.
    """
    first, *others = candidates
    best, least = _better_of(first, problem, Placed(first), _WORST)
    for other in others:
        if least[0] == 0.0 and problem.devices.num_ranks > MANY_RANKS:
            break
        misses = 0.0 < least[0] < np.inf
        if not misses or _surplus(other, problem) <= _surplus(best.placement, problem):
            best, least = _better_of(other, problem, best, least)
    if fallback is not None and (
        least[0] > 0.0
        or (
            _fetched_bytes(fallback, problem) < least[1]
            and _surplus(fallback, problem) <= _surplus(best.placement, problem)
        )
    ):
        best, _ = _better_of(fallback, problem, best, least)
    return best


def _better_of(
    candidate: Placement, problem: Problem, best: Placed, least: _Quality
) -> tuple[Placed, _Quality]:
    """Returns the better one of a candidate and the best so far, with its quality."""
    max_peak = UNLIMITED if least[0] > 0.0 else int(least[1])
    try:
        begun = begin_backward(replace(problem, placement=candidate), max_peak)
    except (DoesNotFitError, TooMuchTrafficError):
        return best, least
    quality = _quality(begun)
    return (Placed(candidate, begun), quality) if quality < least else (best, least)


def _surplus(placement: Placement, problem: Problem) -> int:
    """Returns the load above the capacity of ranks, with every task at home."""
    devices, documents = problem.devices, problem.document_loads(problem.cost.backward.ps)
    load = np.zeros(devices.num_ranks, np.int64)
    shards = placement.document, placement.start, placement.stop
    np.add.at(load, placement.worker, documents.load_of_shards(*shards))
    above = load - devices.capacity(int(load.sum()), problem.tolerance)
    return int(np.maximum(above, 0).sum())


def _fetched_bytes(placement: Placement, problem: Problem) -> float:
    """Returns what a worker fetches on average if no task moves, with keys of two shards twice.

    Where documents are dealt head-tail, this is about the peak: a worker has one shard that needs
    few keys, and one that needs many. The worker with the last tokens needs no key twice. If a
    worker does not serve, its tasks have to move, and nothing is known.
    """
    if not problem.devices.speed[: placement.num_workers].all():
        return np.inf
    keys = Tasks.at_home(placement, problem.reach).keys
    fetched = int(keys.sum() - placement.tokens.sum())
    return fetched * problem.shape.kv_bytes / placement.num_workers


def _quality(begun: BegunSchedule) -> _Quality:
    """Returns the quality with the first search order."""
    problem, tasks = begun.shards.problem, begun.first.tasks
    placement, devices = problem.placement, problem.devices
    moved = traffic(tasks, placement, problem.shape, devices.node)
    return begun.first.missed, moved.worst, moved.total
