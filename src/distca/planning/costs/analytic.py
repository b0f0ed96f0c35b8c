"""Analytic costs: the rate of a kernel, and overheads for its tiles, rows, keys and tasks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distca.planning.costs.base import BACKWARD_FLOPS, LINEAR_TFLOPS, PS
from distca.planning.models import ModelShape
from distca.planning.spans import Ints

TILE = 128  # query rows that a kernel computes together


@dataclass(frozen=True)
class KernelRate:
    """The speed of a varlen kernel in one direction (measurements: docs/planning.md).

    A task takes ``(pairs + row_keys * queries + key_queries * keys) / rate + task_s``. Each row of
    queries costs as much as ``row_keys`` more keys, because q is loaded and o is stored. Each key
    costs as much as ``key_queries`` more queries, because backward reads and writes dk and dv once
    for each task.
    """

    tflops: float
    row_keys: float
    key_queries: float
    task_s: float


@dataclass(frozen=True)
class AnalyticCost:
    """FLOPs divided by a rate, with tile quantisation and the overheads of short shards."""

    flops_per_pair: float
    forward: KernelRate
    backward: KernelRate
    name: str = "analytic"
    tile: int = TILE  # query rows that are computed together; the last tile may be partly empty
    linear_tflops: float = LINEAR_TFLOPS

    @classmethod
    def of(cls, shape: ModelShape) -> AnalyticCost:
        """Returns constants fitted to flash-attn-4 on an H200 (docs/planning.md shows the fit)."""
        return cls(
            flops_per_pair=shape.flops_per_pair,
            forward=KernelRate(tflops=645.0, row_keys=550.0, key_queries=0.0, task_s=0.5e-6),
            backward=KernelRate(tflops=615.0, row_keys=300.0, key_queries=245.0, task_s=2.0e-6),
        )

    @classmethod
    def cpu(cls, shape: ModelShape) -> AnalyticCost:
        """Returns constants fitted to torch's flash kernel on one CPU core."""
        return cls(
            flops_per_pair=shape.flops_per_pair,
            forward=KernelRate(tflops=0.092, row_keys=54.0, key_queries=10.0, task_s=1.2e-6),
            backward=KernelRate(tflops=0.098, row_keys=50.0, key_queries=0.0, task_s=2.1e-6),
            name="cpu",
            tile=1,
            linear_tflops=0.06,
        )

    @property
    def min_forward_ps_per_pair(self) -> float:
        return self.flops_per_pair / self.forward.tflops

    @property
    def min_backward_ps_per_pair(self) -> float:
        return BACKWARD_FLOPS * self.flops_per_pair / self.backward.tflops

    def forward_ps(self, queries: Ints, keys: Ints, pairs: Ints) -> Ints:
        return self._ps(self.forward, 1.0, queries, keys, pairs)

    def backward_ps(self, queries: Ints, keys: Ints, pairs: Ints) -> Ints:
        return self._ps(self.backward, BACKWARD_FLOPS, queries, keys, pairs)

    def _ps(self, rate: KernelRate, flops: float, queries: Ints, keys: Ints, pairs: Ints) -> Ints:
        # Padding rows of the last tile cost as much as the others, and tiles on the diagonal are
        # computed in full although half of each is masked.
        rows = (queries + (self.tile - 1)) // self.tile * self.tile
        work = pairs * (rows / np.maximum(queries, 1))
        work += rows * (rate.row_keys + self.tile / 2) + keys * rate.key_queries
        ps_per_pair = flops * self.flops_per_pair / rate.tflops  # FLOPs / (TFLOP/s) is ps
        return np.rint(work * ps_per_pair + rate.task_s * PS).astype(np.int64)
