"""Fits an analytic cost model to timed kernel calls.

A fused call takes as long as its tasks together, so a few dozen timed calls of real plans determine
the four numbers of a ``KernelCost``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from distca.planning.costs.analytic import TILE, KernelCost
from distca.planning.costs.base import BACKWARD_FLOPS, PS, CostModel
from distca.planning.models import ModelShape
from distca.planning.spans import Floats, Ints


@dataclass(frozen=True, eq=False)
class TimedCall:
    """A fused call: its tasks, and the seconds that it took forward and backward."""

    queries: Ints
    keys: Ints
    pairs: Ints
    forward_s: float
    backward_s: float


def calibrated(
    shape: ModelShape, calls: Sequence[TimedCall], name: str, tile: int = TILE
) -> CostModel:
    """Returns the analytic model with the smallest sum of squared relative errors of the calls."""
    if not calls:
        raise ValueError("there are no timed calls: measure at least one")
    forward = np.array([call.forward_s for call in calls])
    backward = np.array([call.backward_s for call in calls])
    if not (np.all(forward > 0) and np.all(backward > 0)):
        raise ValueError("a timed call took 0 s: every measurement must be above 0 s")
    return CostModel(
        name=name,
        forward=_fit(calls, forward, shape.flops_per_pair, tile),
        backward=_fit(calls, backward, BACKWARD_FLOPS * shape.flops_per_pair, tile),
    )


def _fit(
    calls: Sequence[TimedCall], seconds: Floats, flops_per_pair: float, tile: int
) -> KernelCost:
    terms = np.array([_terms(call, tile) for call in calls])
    relative = terms / seconds[:, None]
    scale = relative.max(axis=0)
    found, _ = nnls(relative / scale, np.ones(len(seconds)))
    work, rows, keys, tasks = (found / scale).tolist()
    if work == 0:
        raise ValueError("the times do not grow with query-key pairs: measure longer calls")
    return KernelCost(
        flops_per_pair=flops_per_pair,
        tflops=flops_per_pair / (work * PS),
        row_keys=rows / work,
        key_queries=keys / work,
        task_s=tasks,
        tile=tile,
    )


def _terms(call: TimedCall, tile: int) -> tuple[float, float, float, float]:
    """Returns the factors of the four numbers of the model, as ``KernelCost.ps`` combines them."""
    rows = (call.queries + (tile - 1)) // tile * tile
    work = np.sum(call.pairs * (rows / np.maximum(call.queries, 1)) + rows * (tile / 2))
    return float(work), float(rows.sum()), float(call.keys.sum()), float(len(rows))
