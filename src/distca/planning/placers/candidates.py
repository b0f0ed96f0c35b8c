"""Placements that are compared by what the scheduler makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from distca.planning.devices import UNLIMITED
from distca.planning.placement import Placement
from distca.planning.problem import DoesNotFitError, Problem
from distca.planning.schedulers.budget import MANY_RANKS
from distca.planning.schedulers.disaggregated import BegunSchedule, begin_backward
from distca.planning.schedulers.orders import TooMuchTrafficError
from distca.planning.tasks import Tasks
from distca.planning.traffic import traffic


@dataclass(frozen=True, eq=False)
class Placed:
    """A placement, and what its placer has done that a plan of it makes use of.

    begun: the schedule as far as the placer had to make it, of the placer's own problem. A plan of
        another one, such as under another mask, does not use it.
    taken: requests whose time the placer takes (``Budget.of``).
    """

    placement: Placement
    begun: BegunSchedule | None = None
    taken: int = 0


@dataclass(frozen=True, eq=False)
class _Scheduled:
    """A candidate after scheduling, with the first search order."""

    placement: Placement
    begun: BegunSchedule

    @property
    def missed(self) -> float:
        """Imbalance above the bound."""
        return self.begun.first.missed

    @cached_property
    def moved(self) -> tuple[int, int]:
        """Peak and total traffic."""
        problem, tasks = self.begun.shards.problem, self.begun.first.tasks
        moved = traffic(tasks, self.placement, problem.shape, problem.devices.node)
        return moved.worst, moved.total

    def is_better(self, other: _Scheduled) -> bool:
        if self.missed != other.missed:
            return self.missed < other.missed
        return self.moved < other.moved


def best_of(
    candidates: Sequence[Placement],
    problem: Problem,
    fallback: Placement | None = None,
    taken: int = 0,
) -> Placed:
    """Returns the placement with the best quality after scheduling.

    Where one misses the bound, others with a larger surplus would miss it by more. On many ranks,
    the first that meets it is taken: others are as good on average, and take time.

    fallback: one with many shards, each of which takes time. It is scheduled only if no candidate
        meets the bound, or if its workers serve, have no larger surplus than those of the best
        candidate, and fetch less than its peak.
    taken: requests whose time the placer takes.
    """
    best: _Scheduled | None = None
    for candidate in candidates:
        if best is not None and best.missed == 0.0 and problem.devices.num_ranks > MANY_RANKS:
            break
        if best is None or best.missed == 0.0 or _has_no_more_surplus(candidate, best):
            best = _better_of(candidate, problem, best, taken)
    if fallback is not None and (
        best is None
        or best.missed > 0.0
        or (
            _fetched_bytes(fallback, problem) < best.moved[0]
            and _has_no_more_surplus(fallback, best)
        )
    ):
        best = _better_of(fallback, problem, best, taken)
    if best is None:
        return Placed(candidates[0], taken=taken)
    return Placed(best.placement, best.begun, taken)


def _better_of(
    candidate: Placement, problem: Problem, best: _Scheduled | None, taken: int
) -> _Scheduled | None:
    """Returns the better one of a candidate and the best so far; None if neither fits."""
    max_peak = UNLIMITED if best is None or best.missed > 0.0 else best.moved[0]
    try:
        begun = begin_backward(replace(problem, placement=candidate), taken, max_peak)
    except (DoesNotFitError, TooMuchTrafficError):
        return best
    scheduled = _Scheduled(candidate, begun)
    return scheduled if best is None or scheduled.is_better(best) else best


def _has_no_more_surplus(candidate: Placement, best: _Scheduled) -> bool:
    problem = best.begun.shards.problem
    return _surplus(candidate, problem) <= _surplus(best.placement, problem)


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
