"""Costs interpolated from a measured profile."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np

from distca.planning.costs.base import BACKWARD_FLOPS, LINEAR_TFLOPS, CostModel
from distca.planning.costs.profile import Profile, Rates
from distca.planning.models import ModelShape
from distca.planning.spans import Floats, Ints


@dataclass(frozen=True)
class Table:
    """The cost of tasks in one direction, interpolated over (queries, keys).

    A task takes ``min_ps_per_pair x pairs + queries x keys x overhead``. Costs per row, per key and
    per task make the overhead ``a + b / keys + c / queries + d / (queries x keys)``. This is
    bilinear in (1 / queries, 1 / keys), so the overhead is interpolated bilinearly in these two
    between measured shapes. Outside the table the overhead of the nearest measured shape is used.

    Rows and columns are queries and keys in whole tiles. Each cell of the table stores a polynomial
    instead of interpolation weights, because planning evaluates many short arrays, for which the
    number of operations determines the time.
    """

    min_ps_per_pair: float
    rows: Floats  # boundaries between the cells of the table, in tiles of queries
    columns: Floats  # the same in tiles of keys
    overheads: Floats  # [4, cells] (a, b, c, d) of a x rows x columns + b x rows + c x columns + d
    tile: int  # queries and keys that the kernel computes together
    all_causal: bool = False  # whether all tasks are causal, which saves time

    @cached_property
    def for_causal_tasks(self) -> "Table":
        """The same costs, for causal tasks alone."""
        return replace(self, all_causal=True)

    def ps(self, queries: Ints, keys: Ints, pairs: Ints) -> Ints:
        # Operations on floats alone take half the time of those on integers and floats.
        n = np.maximum(queries, 1).astype(np.float64)
        rows = np.ceil(n / self.tile)
        seen = pairs.astype(np.float64) / n  # keys of a query, on average
        arithmetic = seen * rows * (self.tile * self.min_ps_per_pair)
        if self.all_causal:
            overhead = self._overhead(rows, keys.astype(np.float64))
            return np.rint(arithmetic + overhead).astype(np.int64)
        # Measured tasks are causal. Others have the overhead of a causal task with as many pairs;
        # those with fewer pairs than a document of n tokens, that of several shorter documents.
        half = n * 0.5
        keys_if_causal = np.minimum(keys, seen + half)  # up to half a key, which makes no tile
        fewer = seen < half
        if not fewer.any():
            return np.rint(arithmetic + self._overhead(rows, keys_if_causal)).astype(np.int64)
        length = np.where(fewer, np.maximum(2.0 * seen, 1.0), n)
        overhead = self._overhead(
            np.ceil(length / self.tile), np.where(fewer, length, keys_if_causal)
        )
        return np.rint(arithmetic + overhead * (n / length)).astype(np.int64)

    def plus(self, other: Self, weight: float) -> Self:
        return replace(
            self,
            min_ps_per_pair=self.min_ps_per_pair + weight * other.min_ps_per_pair,
            overheads=self.overheads + weight * other.overheads,
        )

    def _overhead(self, rows: Floats, keys: Floats) -> Floats:
        columns = np.ceil(keys / self.tile)
        cell = self._cells[0].take(rows.astype(np.int64), mode="clip")
        cell = cell + self._cells[1].take(columns.astype(np.int64), mode="clip")
        a, b, c, d = self.overheads.take(cell, axis=1, mode="clip")
        overhead: Floats = np.maximum((a * columns + b) * rows + (c * columns + d), 0.0)
        return overhead

    @cached_property
    def _cells(self) -> tuple[Ints, Ints]:
        """The first cell of each number of rows, and how far from it that of a column is.

        Entries are whole tiles, up to the last boundary: looking up is faster than searching.
        """
        row, column = (
            bounds.searchsorted(np.arange(np.ceil(bounds[-1:].sum()) + 1), side="right")
            for bounds in (self.rows, self.columns)
        )
        return row * (len(self.columns) + 1), column


def table_cost(profile: Profile, shape: ModelShape) -> CostModel:
    """Returns the costs of a profile; its rates are assumed to hold for the heads of ``shape``.

    Rates are those of parts measured alone, and costs those of parts of whole layers.
    """
    sustained = profile.sustained or 1.0
    flops_per_pair = shape.flops_per_pair / sustained
    try:
        return CostModel(
            name=profile.name,
            forward=_table(profile, profile.forward_tflops, flops_per_pair),
            backward=_table(profile, profile.backward_tflops, BACKWARD_FLOPS * flops_per_pair),
            linear_tflops=(profile.linear_tflops or LINEAR_TFLOPS) * sustained,
        )
    except ValueError as error:
        raise ValueError(f"the profile is not usable: {error}") from None


def _table(profile: Profile, rates: Rates, flops_per_pair: float) -> Table:
    """Converts measured rates to the lowest cost and overheads."""
    queries, keys = (np.array(grid, np.float64) for grid in (profile.queries, profile.keys))
    tflops, tile = np.array(rates, np.float64), profile.tile  # NaN where nothing was measured
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
    return Table(
        min_ps_per_pair=lowest,
        rows=queries[1:] / tile,
        columns=keys[1:] / tile,
        overheads=np.stack([one.T.ravel() for one in (a, b, c, d)]),
        tile=tile,
    )


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
