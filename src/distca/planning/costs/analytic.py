"""Analytic costs: a kernel's rate, and what its tiles, rows, keys and tasks add."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distca.planning.costs.base import BACKWARD_FLOPS, LINEAR_TFLOPS, PS
from distca.planning.models import ModelShape
from distca.planning.spans import Ints

TILE = 128  # query rows that a kernel works on at once


@dataclass(frozen=True)
class KernelRate:
    """One direction of a varlen kernel, in the terms its measurements follow (docs/planning.md).

    A task takes ``(pairs + row_keys * queries + key_queries * keys) / rate + task_s``: each row of
    queries costs as much as ``row_keys`` more keys (loading q, storing o), and each key costs as
    much as ``key_queries`` more queries (backward reads and writes dk and dv once per task).
    """

    tflops: float
    row_keys: float
    key_queries: float
    task_s: float


@dataclass(frozen=True)
class AnalyticCost:
    """FLOPs over a rate, with tile quantisation and the overheads of short shards."""

    flops_per_pair: float
    forward: KernelRate
    backward: KernelRate
    name: str = "analytic"
    tile: int = TILE  # query rows that are computed together, full or not
    linear_tflops: float = LINEAR_TFLOPS

    @classmethod
    def of(cls, shape: ModelShape) -> AnalyticCost:
        """Constants fitted to flash-attn-4 on an H200 (docs/planning.md shows fit and figures)."""
        return cls(
            flops_per_pair=shape.flops_per_pair,
            forward=KernelRate(tflops=645.0, row_keys=550.0, key_queries=0.0, task_s=0.5e-6),
            backward=KernelRate(tflops=615.0, row_keys=300.0, key_queries=245.0, task_s=2.0e-6),
        )

    @classmethod
    def cpu(cls, shape: ModelShape) -> AnalyticCost:
        """torch's flash kernel on one core, fitted to timed calls: short documents are cheap."""
        return cls(
            flops_per_pair=shape.flops_per_pair,
            forward=KernelRate(tflops=0.092, row_keys=54.0, key_queries=10.0, task_s=1.2e-6),
            backward=KernelRate(tflops=0.098, row_keys=50.0, key_queries=0.0, task_s=2.1e-6),
            name="cpu",
            tile=1,
            linear_tflops=0.06,
        )

    @property
    def least_forward_ps_per_pair(self) -> float:
        return self.flops_per_pair / self.forward.tflops

    @property
    def least_backward_ps_per_pair(self) -> float:
        return BACKWARD_FLOPS * self.flops_per_pair / self.backward.tflops

    def forward_ps(self, queries: Ints, keys: Ints, pairs: Ints) -> Ints:
        return self._ps(self.forward, 1.0, queries, keys, pairs)

    def backward_ps(self, queries: Ints, keys: Ints, pairs: Ints) -> Ints:
        return self._ps(self.backward, BACKWARD_FLOPS, queries, keys, pairs)

    def _ps(self, rate: KernelRate, flops: float, queries: Ints, keys: Ints, pairs: Ints) -> Ints:
        # Rows that pad the last tile cost as much as the others, and the diagonal tile of every
        # row is computed whole, half of it masked.
        rows = (queries + (self.tile - 1)) // self.tile * self.tile
        work = pairs * (rows / np.maximum(queries, 1))
        work += rows * (rate.row_keys + self.tile / 2) + keys * rate.key_queries
        ps_per_pair = flops * self.flops_per_pair / rate.tflops  # FLOPs / (TFLOP/s) is ps
        return np.rint(work * ps_per_pair + rate.task_s * PS).astype(np.int64)
