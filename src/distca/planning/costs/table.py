"""Costs interpolated from a measured profile."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distca.planning.costs.base import BACKWARD_FLOPS, LINEAR_TFLOPS
from distca.planning.costs.profile import Profile
from distca.planning.models import ModelShape
from distca.planning.spans import Floats, Ints


@dataclass(frozen=True)
class Table:
    """One direction of a measured kernel; see ``TableCost``."""

    least_ps_per_pair: float
    overheads: Floats  # [4, cells] of a x rows x columns + b x rows + c x columns + d


@dataclass(frozen=True)
class TableCost:
    """Seconds interpolated from a measured profile over (queries, keys).

    A task takes ``least x pairs + queries x keys x overhead``. Costs per row, per key and per task
    make the overhead ``a + b / keys + c / queries + d / (queries x keys)``: bilinear in (1 /
    queries, 1 / keys), which is how it is interpolated between the shapes that were measured.
    Beyond the table the last overhead holds, so rates stay what they are there.

    Rows and columns are queries and keys in whole tiles. Planning prices many short arrays, for
    which it is the number of operations that counts: hence polynomials instead of weights.
    """

    name: str
    rows: Floats  # where the cells of the table meet
    columns: Floats
    forward: Table
    backward: Table
    tile: int  # queries and keys that are computed together, full or not
    linear_tflops: float

    @classmethod
    def from_profile(cls, profile: Profile, shape: ModelShape) -> TableCost:
        """Rates are rescaled to ``shape``'s heads."""
        queries, keys = (np.array(g, dtype=np.float64) for g in (profile.queries, profile.keys))
        try:
            forward, backward = (
                _table(np.array(rates, dtype=np.float64), queries, keys, profile.tile, flops)
                for rates, flops in (
                    (profile.forward_tflops, shape.flops_per_pair),
                    (profile.backward_tflops, BACKWARD_FLOPS * shape.flops_per_pair),
                )
            )
        except ValueError as error:
            raise ValueError(f"the profile is not usable: {error}") from None
        return cls(
            name=profile.name,
            rows=queries[1:] / profile.tile,
            columns=keys[1:] / profile.tile,
            forward=forward,
            backward=backward,
            tile=profile.tile,
            linear_tflops=profile.linear_tflops or LINEAR_TFLOPS,
        )

    @property
    def least_forward_ps_per_pair(self) -> float:
        return self.forward.least_ps_per_pair

    @property
    def least_backward_ps_per_pair(self) -> float:
        return self.backward.least_ps_per_pair

    def forward_ps(self, queries: Ints, keys: Ints, pairs: Ints) -> Ints:
        return self._ps(self.forward, queries, keys, pairs)

    def backward_ps(self, queries: Ints, keys: Ints, pairs: Ints) -> Ints:
        return self._ps(self.backward, queries, keys, pairs)

    def _ps(self, table: Table, queries: Ints, keys: Ints, pairs: Ints) -> Ints:
        n = np.maximum(queries, 1)
        rows, columns = np.ceil(n / self.tile), np.ceil(keys / self.tile)
        row = self.rows.searchsorted(rows, side="right")
        cell = row * (len(self.columns) + 1) + self.columns.searchsorted(columns, side="right")
        a, b, c, d = table.overheads.take(cell, axis=1)
        overhead = np.maximum((a * columns + b) * rows + (c * columns + d), 0.0)
        arithmetic = pairs / n * rows * (self.tile * table.least_ps_per_pair)
        ps: Floats = arithmetic + overhead
        return np.rint(ps).astype(np.int64)


def _table(
    tflops: Floats, queries: Floats, keys: Floats, tile: int, flops_per_pair: float
) -> Table:
    """Measured rates, NaN where there are none, as least cost and overheads."""
    possible = keys >= queries[:, None]
    ps_per_pair = flops_per_pair / _filled(tflops, queries, keys)  # FLOPs / (TFLOP/s) is ps
    least = float(ps_per_pair[possible].min())
    row_keys = keys - (queries[:, None] - 1) / 2  # that a query of a causal task sees, on average
    overhead = (ps_per_pair - least) * (row_keys / keys)
    # Fewer keys than queries cannot be: there a cell's other three corners span a plane.
    for j in range(len(keys) - 2, -1, -1):
        for i in np.flatnonzero(~possible[:, j]):
            above = overhead[i - 1, j] - overhead[i - 1, j + 1] if i else 0.0
            overhead[i, j] = overhead[i, j + 1] + above
    level, by_row = _lines(overhead * tile**2, tile / queries)
    (a, b), (c, d) = (_lines(one.T, tile / keys) for one in (level, by_row))
    return Table(least, np.stack([one.T.ravel() for one in (a, b, c, d)]))


def _lines(values: Floats, inverse: Floats) -> tuple[Floats, Floats]:
    """Level and slope of the line in each cell of the first axis; beyond the last it is level."""
    slope = np.zeros_like(values)
    slope[:-1] = np.diff(values, axis=0) / np.diff(inverse)[:, None]
    return values - slope * inverse[:, None], slope


def _filled(tflops: Floats, queries: Floats, keys: Floats) -> Floats:
    """Rates with the holes of a profile closed, row by row, from what was measured in the row."""
    filled = tflops.copy()
    for i, row in enumerate(np.isfinite(tflops)):
        if not row.any():
            raise ValueError(f"no rate at all for {queries[i]:.0f} queries")
        filled[i] = 1 / np.interp(-1 / keys, -1 / keys[row], 1 / tflops[i, row])
    return filled
