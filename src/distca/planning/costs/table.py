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
    """One direction of a measured kernel (see ``TableCost``)."""

    min_ps_per_pair: float
    overheads: Floats  # [4, cells] (a, b, c, d) of a x rows x columns + b x rows + c x columns + d


@dataclass(frozen=True)
class TableCost:
    """Costs interpolated from a measured profile over (queries, keys).

    A task takes ``min_ps_per_pair x pairs + queries x keys x overhead``. Costs per row, per key and
    per task make the overhead ``a + b / keys + c / queries + d / (queries x keys)``. This is
    bilinear in (1 / queries, 1 / keys), so the overhead is interpolated bilinearly in these two
    between measured shapes. Outside the table the overhead of the nearest measured shape is used.

    Rows and columns are queries and keys in whole tiles. Each cell of the table stores a polynomial
    instead of interpolation weights, because planning prices many short arrays, for which the
    number of operations determines the time.
    """

    name: str
    rows: Floats  # boundaries between the cells of the table, in tiles of queries
    columns: Floats  # the same in tiles of keys
    forward: Table
    backward: Table
    tile: int  # queries and keys that the kernel computes together
    linear_tflops: float

    @classmethod
    def from_profile(cls, profile: Profile, shape: ModelShape) -> TableCost:
        """Builds the tables; rates are assumed to hold for the heads of ``shape``."""
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
    def min_forward_ps_per_pair(self) -> float:
        return self.forward.min_ps_per_pair

    @property
    def min_backward_ps_per_pair(self) -> float:
        return self.backward.min_ps_per_pair

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
        arithmetic = pairs / n * rows * (self.tile * table.min_ps_per_pair)
        ps: Floats = arithmetic + overhead
        return np.rint(ps).astype(np.int64)


def _table(
    tflops: Floats, queries: Floats, keys: Floats, tile: int, flops_per_pair: float
) -> Table:
    """Converts measured rates, NaN where there are none, to the lowest cost and overheads."""
    possible = keys >= queries[:, None]
    ps_per_pair = flops_per_pair / _fill_gaps(tflops, queries, keys)  # FLOPs / (TFLOP/s) is ps
    lowest = float(ps_per_pair[possible].min())
    keys_seen = keys - (queries[:, None] - 1) / 2  # by a query of a causal task, on average
    overhead = (ps_per_pair - lowest) * (keys_seen / keys)
    # A task cannot have fewer keys than queries. Such corners of the table continue the plane
    # through the other three corners of their cell.
    for j in range(len(keys) - 2, -1, -1):
        for i in np.flatnonzero(~possible[:, j]):
            above = overhead[i - 1, j] - overhead[i - 1, j + 1] if i else 0.0
            overhead[i, j] = overhead[i, j + 1] + above
    level, by_row = _lines(overhead * tile**2, tile / queries)
    (a, b), (c, d) = (_lines(one.T, tile / keys) for one in (level, by_row))
    return Table(lowest, np.stack([one.T.ravel() for one in (a, b, c, d)]))


def _lines(values: Floats, inverse: Floats) -> tuple[Floats, Floats]:
    """Returns level and slope of the line in each cell of the first axis; the last one is flat."""
    slope = np.zeros_like(values)
    slope[:-1] = np.diff(values, axis=0) / np.diff(inverse)[:, None]
    return values - slope * inverse[:, None], slope


def _fill_gaps(tflops: Floats, queries: Floats, keys: Floats) -> Floats:
    """Returns rates with missing ones interpolated from those measured in the same row."""
    filled = tflops.copy()
    for i, row in enumerate(np.isfinite(tflops)):
        if not row.any():
            raise ValueError(f"there is no rate for {queries[i]:.0f} queries: measure at least one")
        filled[i] = 1 / np.interp(-1 / keys, -1 / keys[row], 1 / tflops[i, row])
    return filled
