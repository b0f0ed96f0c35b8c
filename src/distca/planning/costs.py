"""What a task costs, in whole picoseconds, forward and backward.

Every model prices arrays of tasks from three numbers each: queries, keys, and query-key pairs.
Results are integers, made by a fixed sequence of IEEE operations, so that a plan built on them is
the same on every platform.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from distca.planning.models import ModelShape
from distca.planning.spans import Floats, Ints

PS = 1e12  # picoseconds in a second
TILE = 128  # query rows that a kernel works on at once
BACKWARD_FLOPS = 2.5  # of forward: five products where forward has two


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
    linear_tflops: float = 610.0

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
class TableCost:
    """Seconds interpolated from a measured profile over (queries, keys).

    The inverse rate is bilinear in (1/queries, 1/keys): a kernel's overheads are a constant per
    row and per key tile, so that is the plane measurements lie on.
    """

    name: str
    queries: Floats
    keys: Floats
    forward_ps_per_pair: Floats
    backward_ps_per_pair: Floats
    linear_tflops: float = 610.0

    @classmethod
    def from_profile(cls, profile: Mapping[str, Any], shape: ModelShape) -> TableCost:
        """``profile`` as docs/planning.md describes it; rates are rescaled to ``shape``'s heads."""
        try:
            queries = np.asarray(profile["queries"], dtype=np.float64)
            keys = np.asarray(profile["keys"], dtype=np.float64)
            tables = [
                _filled(np.asarray(profile[f"{way}_tflops"], dtype=np.float64), queries, keys)
                for way in ("forward", "backward")
            ]
            name = str(profile["name"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"the profile is not usable ({error}): it needs name, queries, keys, and"
                " forward_tflops and backward_tflops as one row of rates per query count"
            ) from None
        return cls(
            name=name,
            queries=queries,
            keys=keys,
            forward_ps_per_pair=shape.flops_per_pair / tables[0],
            backward_ps_per_pair=BACKWARD_FLOPS * shape.flops_per_pair / tables[1],
        )

    @property
    def least_forward_ps_per_pair(self) -> float:
        return float(self.forward_ps_per_pair.min())

    @property
    def least_backward_ps_per_pair(self) -> float:
        return float(self.backward_ps_per_pair.min())

    def forward_ps(self, queries: Ints, keys: Ints, pairs: Ints) -> Ints:
        return self._ps(self.forward_ps_per_pair, queries, keys, pairs)

    def backward_ps(self, queries: Ints, keys: Ints, pairs: Ints) -> Ints:
        return self._ps(self.backward_ps_per_pair, queries, keys, pairs)

    def _ps(self, table: Floats, queries: Ints, keys: Ints, pairs: Ints) -> Ints:
        i, u = _cell(self.queries, queries)
        j, v = _cell(self.keys, keys)
        low = table[i, j] * (1 - v) + table[i, j + 1] * v
        high = table[i + 1, j] * (1 - v) + table[i + 1, j + 1] * v
        return np.rint(pairs * (low * (1 - u) + high * u)).astype(np.int64)


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
    return TableCost.from_profile(_read_profile(cost), shape)


def _read_profile(cost: str) -> Mapping[str, Any]:
    shipped = resources.files("distca.planning") / "profiles" / f"{cost}.json"
    try:
        source = shipped if shipped.is_file() else Path(cost)
        profile = json.loads(source.read_text())
    except OSError:
        raise ValueError(
            f"cost {cost!r} is unknown: say pairs, analytic, cpu, h200, h200-flash,"
            " or the path of a profile file"
        ) from None
    except ValueError as error:
        raise ValueError(f"profile {cost} is not JSON: {error}") from None
    if not isinstance(profile, dict):
        raise ValueError(f"profile {cost} holds no JSON object: see docs/planning.md for the form")
    return profile


def _cell(grid: Floats, values: Ints) -> tuple[Ints, Floats]:
    """Index of the cell of each value, and how far into it the value's inverse lies, 0 to 1."""
    i = np.searchsorted(grid[1:-1], values, side="right")
    inverse = 1.0 / grid
    depth = (inverse[i] - 1.0 / np.maximum(values, 1)) / (inverse[:-1] - inverse[1:])[i]
    return i, np.minimum(np.maximum(depth, 0.0), 1.0)


def _filled(tflops: Floats, queries: Floats, keys: Floats) -> Floats:
    """Rates with the holes of a profile closed, row by row, from what was measured in the row.

    Fewer keys than queries cannot be measured: there the document of that many keys stands in.
    """
    if tflops.shape != (len(queries), len(keys)):
        raise ValueError(f"rates of shape {tflops.shape} for {len(queries)} x {len(keys)} shapes")
    for name, grid in (("queries", queries), ("keys", keys)):
        if len(grid) < 2 or np.any(np.diff(grid) <= 0) or grid[0] <= 0:
            raise ValueError(f"{name} must rise strictly and hold two values or more")
    measured = np.isfinite(tflops)
    if np.any(tflops[measured] <= 0):
        raise ValueError("rates must be above zero")
    filled = tflops.copy()
    for i, row in enumerate(measured):
        if not row.any():
            raise ValueError(f"no rate at all for {queries[i]:.0f} queries")
        filled[i] = 1 / np.interp(-1 / keys, -1 / keys[row], 1 / tflops[i, row])
    for j, count in enumerate(keys):
        whole = int(np.argmin(np.abs(queries - count)))
        filled[queries > count, j] = filled[whole, j]
    return filled
