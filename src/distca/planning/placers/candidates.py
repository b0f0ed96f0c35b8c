"""Placements that are compared by what the scheduler makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from distca.planning.devices import UNLIMITED
from distca.planning.placement import Placement
from distca.planning.problem import DoesNotFitError, Problem
from distca.planning.schedulers.disaggregated import BegunSchedule, begin_backward
from distca.planning.schedulers.orders import TooMuchTrafficError
from distca.planning.traffic import traffic

_WORST = (True, np.inf, np.inf)


@dataclass(frozen=True, eq=False)
class Placed:
    """A placement, and its schedule as far as the placer had to make it.

    begun: of the placer's own problem. A plan of another one, such as under another mask, does not
        use it.
    """

    placement: Placement
    begun: BegunSchedule | None = None


def best_of(candidates: Sequence[Placement], problem: Problem) -> Placed:
    """Returns the placement with the best quality after scheduling."""
    best, least = Placed(candidates[0]), _WORST
    for candidate in candidates:
        max_peak = UNLIMITED if least[0] else int(least[1])
        try:
            begun = begin_backward(replace(problem, placement=candidate), max_peak)
        except (DoesNotFitError, TooMuchTrafficError):
            continue
        quality = _quality(begun)
        if quality < least:
            best, least = Placed(candidate, begun), quality
    return best


def _quality(begun: BegunSchedule) -> tuple[bool, float, float]:
    """Returns, with the first search order: whether the bound is missed; peak and total traffic."""
    problem, tasks = begun.shards.problem, begun.first.tasks
    placement, devices = problem.placement, problem.devices
    load = tasks.load_ps(placement, problem.reach, problem.cost.backward, devices.num_ranks)
    missed = devices.imbalance(load) > 1.0 + problem.tolerance
    moved = traffic(tasks, placement, problem.shape, devices.node)
    return missed, moved.worst, moved.total
