"""Analytic costs: the rate of a kernel, and overheads for its tiles, rows, keys and tasks."""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from distca.planning.costs.base import BACKWARD_FLOPS, PS, CostModel
from distca.planning.models import ModelShape
from distca.planning.spans import Ints

TILE = 128  # query rows that a kernel computes together


@dataclass(frozen=True)
class KernelCost:
    """FLOPs of a varlen kernel divided by its rate, and its overheads (docs/planning.md).

    A task takes ``(pairs + row_keys * queries + key_queries * keys) / rate + task_s``. Each row of
    queries costs as much as ``row_keys`` more keys, because q is loaded and o is stored. Each key
    costs as much as ``key_queries`` more queries, because backward reads and writes dk and dv once
    for each task.
    """

    flops_per_pair: float
    tflops: float
    row_keys: float
    key_queries: float
    task_s: float
    tile: int = TILE  # query rows that are computed together; the last tile may be partly empty

    @property
    def min_ps_per_pair(self) -> float:
        return self.flops_per_pair / self.tflops  # FLOPs / (TFLOP/s) is ps

    def ps(self, queries: Ints, keys: Ints, pairs: Ints) -> Ints:
        # Padding rows of the last tile cost as much as the others, and tiles on the diagonal are
        # computed in full although half of each is masked.
        n = queries.astype(np.float64)  # all floats, which takes half the time
        rows = np.ceil(n / self.tile) * self.tile
        computed = pairs.astype(np.float64) * (rows / np.maximum(n, 1.0))
        computed += (
            rows * (self.row_keys + self.tile / 2) + keys.astype(np.float64) * self.key_queries
        )
        return np.rint(computed * self.min_ps_per_pair + self.task_s * PS).astype(np.int64)

    def plus(self, other: Self, weight: float) -> Self:
        own, others = self.min_ps_per_pair, weight * other.min_ps_per_pair
        share = others / (own + others)
        return replace(
            self,
            flops_per_pair=(own + others) * self.tflops,
            row_keys=(1.0 - share) * self.row_keys + share * other.row_keys,
            key_queries=(1.0 - share) * self.key_queries + share * other.key_queries,
            task_s=self.task_s + weight * other.task_s,
        )


def analytic_cost(shape: ModelShape) -> CostModel:
    """Returns costs fitted to flash-attn-4 on an H200 (docs/planning.md shows the fit)."""
    forward, backward = shape.flops_per_pair, BACKWARD_FLOPS * shape.flops_per_pair
    return CostModel(
        name="analytic",
        forward=KernelCost(forward, tflops=645.0, row_keys=550.0, key_queries=0.0, task_s=0.5e-6),
        backward=KernelCost(
            backward, tflops=615.0, row_keys=300.0, key_queries=245.0, task_s=2.0e-6
        ),
    )


def cpu_cost(shape: ModelShape) -> CostModel:
    """Returns costs fitted to torch's flash kernel on one CPU core."""
    forward, backward = shape.flops_per_pair, BACKWARD_FLOPS * shape.flops_per_pair
    return CostModel(
        name="cpu",
        forward=KernelCost(forward, 0.092, row_keys=54.0, key_queries=10.0, task_s=1.2e-6, tile=1),
        backward=KernelCost(backward, 0.098, row_keys=50.0, key_queries=0.0, task_s=2.1e-6, tile=1),
        linear_tflops=0.06,
    )
