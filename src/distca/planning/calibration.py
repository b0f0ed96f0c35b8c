"""A cost model from measured kernel calls: what a device and its kernels really take.

A fused call takes as long as its tasks together, so that a few dozen timed calls of real plans
determine the four numbers of a ``KernelRate``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from distca.planning.costs.analytic import TILE, AnalyticCost, KernelRate
from distca.planning.costs.base import BACKWARD_FLOPS, PS
from distca.planning.models import ModelShape
from distca.planning.spans import Floats, Ints


@dataclass(frozen=True, eq=False)
class TimedCall:
    """One fused call: its tasks, and how long it took each way."""

    queries: Ints
    keys: Ints
    pairs: Ints
    forward_s: float
    backward_s: float


def calibrated(
    shape: ModelShape, calls: Sequence[TimedCall], name: str, tile: int = TILE
) -> AnalyticCost:
    """The analytic model that comes closest to the calls, each weighed by its share of error."""
    if not calls:
        raise ValueError("no timed calls: measure at least one")
    forward = np.array([call.forward_s for call in calls])
    backward = np.array([call.backward_s for call in calls])
    if not (np.all(forward > 0) and np.all(backward > 0)):
        raise ValueError("a timed call took no time: every measurement must be above 0 s")
    return replace(
        AnalyticCost.of(shape),
        forward=_fit(calls, forward, shape.flops_per_pair, tile),
        backward=_fit(calls, backward, BACKWARD_FLOPS * shape.flops_per_pair, tile),
        name=name,
        tile=tile,
    )


def _fit(
    calls: Sequence[TimedCall], seconds: Floats, flops_per_pair: float, tile: int
) -> KernelRate:
    terms = np.array([_terms(call, tile) for call in calls])
    work, rows, keys, tasks = _least_squares(terms, seconds)
    return KernelRate(
        tflops=flops_per_pair / (work * PS),
        row_keys=rows / work,
        key_queries=keys / work,
        task_s=tasks,
    )


def _terms(call: TimedCall, tile: int) -> tuple[float, float, float, float]:
    """What each number of the model is multiplied with, as ``AnalyticCost`` prices a task."""
    rows = (call.queries + (tile - 1)) // tile * tile
    work = np.sum(call.pairs * (rows / np.maximum(call.queries, 1)) + rows * (tile / 2))
    return float(work), float(rows.sum()), float(call.keys.sum()), float(len(rows))


def _least_squares(terms: Floats, seconds: Floats) -> tuple[float, float, float, float]:
    """Without a negative number among the results: the best of all sets of terms left out.

    Relative errors are squared. The first term, arithmetic, always stays.
    """
    weighed = terms / seconds[:, None]
    best, least = np.zeros(4), np.inf
    for size in range(4):
        for others in combinations((1, 2, 3), size):
            chosen = [0, *others]
            scale = weighed[:, chosen].max(axis=0)
            scale = np.where(scale > 0, scale, 1.0)
            found, *_ = np.linalg.lstsq(weighed[:, chosen] / scale, np.ones(len(seconds)))
            error = float(np.sum((weighed[:, chosen] @ (found / scale) - 1.0) ** 2))
            if np.all(found >= 0) and found[0] > 0 and error < least:
                best, least = np.zeros(4), error
                best[chosen] = found / scale
    work, rows, keys, tasks = best.tolist()
    return work, rows, keys, tasks
