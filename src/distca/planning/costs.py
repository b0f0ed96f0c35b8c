"""What a task costs, in whole picoseconds, forward and backward.

Every model prices arrays of tasks from three numbers each: queries, keys, and query-key pairs.
Results are integers, made by a fixed sequence of IEEE operations, so that a plan built on them is
the same on every platform.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from distca.planning.models import ModelShape
from distca.planning.profile import Profile
from distca.planning.spans import Floats, Ints

PS = 1e12  # picoseconds in a second
TILE = 128  # query rows that a kernel works on at once
BACKWARD_FLOPS = 2.5  # of forward: five products where forward has two
LINEAR_TFLOPS = 610.0  # a layer of Llama-3-8B but for its attention, on an H200


class CostModel(Protocol):
    """Seconds of a task; ``name`` says in reports what was balanced."""

    @property
    def name(self) -> str: ...

    @property
    def least_forward_ps_per_pair(self) -> float:
        """What no task goes below, forward; for lower bounds."""
        ...

    @property
    def least_backward_ps_per_pair(self) -> float: ...

    @property
    def linear_tflops(self) -> float:
        """The rate of linear layers beside the attention."""
        ...

    def forward_ps(self, queries: Ints, keys: Ints, pairs: Ints) -> Ints: ...

    def backward_ps(self, queries: Ints, keys: Ints, pairs: Ints) -> Ints: ...


@dataclass(frozen=True)
class PairsCost:
    """Arithmetic alone: what FLOP-counting planners balance. Exact, and additive under cutting."""

    name: str = "pairs"
    least_forward_ps_per_pair: float = 2.0
    least_backward_ps_per_pair: float = 5.0
    linear_tflops: float = float("inf")  # no seconds here, so linear layers take none

    def forward_ps(self, queries: Ints, keys: Ints, pairs: Ints) -> Ints:
        return 2 * pairs

    def backward_ps(self, queries: Ints, keys: Ints, pairs: Ints) -> Ints:
        return 5 * pairs


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


@dataclass(frozen=True)
class OneWay:
    """A model for a pass in one direction alone, which is then all that a plan must even out."""

    model: CostModel
    backward: bool

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def linear_tflops(self) -> float:
        return self.model.linear_tflops

    @property
    def least_forward_ps_per_pair(self) -> float:
        model = self.model
        return (
            model.least_backward_ps_per_pair if self.backward else model.least_forward_ps_per_pair
        )

    least_backward_ps_per_pair = least_forward_ps_per_pair

    def forward_ps(self, queries: Ints, keys: Ints, pairs: Ints) -> Ints:
        price = self.model.backward_ps if self.backward else self.model.forward_ps
        return price(queries, keys, pairs)

    backward_ps = forward_ps


def cost_model(cost: str | CostModel, shape: ModelShape) -> CostModel:
    """``pairs``, ``analytic``, ``cpu``, a shipped profile's name, or a profile file's path."""
    if not isinstance(cost, str):
        return cost
    if cost == "pairs":
        return PairsCost()
    if cost == "analytic":
        return AnalyticCost.of(shape)
    if cost == "cpu":
        return AnalyticCost.cpu(shape)
    try:
        profile = Profile.read(cost)
    except OSError:
        raise ValueError(
            f"cost {cost!r} is unknown: say pairs, analytic, cpu, h200, h200-flash,"
            " or the path of a profile file"
        ) from None
    return TableCost.from_profile(profile, shape)


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
