"""What a device was measured to do, as data: one JSON file for the planner and the simulator.

``distca profile`` writes it and ``TableCost`` prices tasks by it; docs/profile.md explains it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from importlib import resources
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

DEFAULT_COST = "h200"  # the shipped profile that plans are priced by unless told otherwise
NEEDED = (
    "it needs name, queries, keys, and forward_tflops and backward_tflops as one row of rates per"
    " query count"
)
SETTING = (
    "device", "backend", "dtype", "ranks", "heads", "kv_heads", "head_dim", "hidden", "ffn",
    "queries", "keys", "tile", "versions",
)  # fmt: skip
Rates = tuple[tuple[float | None, ...], ...]  # TFLOP/s, a row for each query count
_Record = TypeVar("_Record")


@dataclass(frozen=True)
class Exchange:
    """An all-to-all in which every rank sends ``bytes`` to all others together."""

    bytes: int
    bytes_per_s: float


@dataclass(frozen=True)
class HeldOut:
    """A fused call that the table was not made from: what it took, and what the table says.

    It holds the tasks (queries[i], keys[i]), all of them ``repeat`` times.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    repeat: int
    forward_s: float
    backward_s: float
    forward_predicted_s: float
    backward_predicted_s: float

    @property
    def forward_error(self) -> float:
        return abs(self.forward_predicted_s / self.forward_s - 1)

    @property
    def backward_error(self) -> float:
        return abs(self.backward_predicted_s / self.backward_s - 1)


@dataclass(frozen=True)
class Errors:
    """Of all held-out calls, relative."""

    median: float
    worst: float


@dataclass(frozen=True)
class Profile:
    """Rates over (queries, keys) of causal tasks in full batches, and what lies around them.

    A rate is None where there are fewer keys than queries, or where nothing was measured (yet).
    """

    name: str
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    forward_tflops: Rates
    backward_tflops: Rates
    tile: int = 1  # rows that the kernel computes together, full or not
    device: str = ""
    backend: str = ""
    dtype: str = ""
    ranks: int = 1  # that measured at the same time; figures are their mean
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    hidden: int = 0
    ffn: int = 0
    date: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    linear_tflops: float | None = None  # a layer but for its attention, forward and backward
    copy_bytes_per_s: float | None = None  # read and written on the device
    exchange: tuple[Exchange, ...] = ()  # empty on one rank
    held_out: tuple[HeldOut, ...] = ()

    def __post_init__(self) -> None:
        for what, grid in (("queries", self.queries), ("keys", self.keys)):
            rises = all(a < b for a, b in pairwise(grid))
            if len(grid) < 2 or grid[0] <= 0 or not rises:
                raise ValueError(f"{what} must rise strictly and hold two values or more")
        for rates in (self.forward_tflops, self.backward_tflops):
            shape = (len(rates), *sorted({len(row) for row in rates}))
            if shape != (len(self.queries), len(self.keys)):
                raise ValueError(
                    f"rates of shape {shape} for {len(self.queries)} x {len(self.keys)} shapes"
                )
            if any(rate is not None and not _is_rate(rate) for row in rates for rate in row):
                raise ValueError("rates must be above zero")
        for one in (self.linear_tflops, self.copy_bytes_per_s):
            if one is not None and not _is_rate(one):
                raise ValueError("linear_tflops and copy_bytes_per_s must be above zero")
        if self.tile < 1:
            raise ValueError(f"tile is {self.tile}: a tile has one row or more")

    @property
    def missing(self) -> list[tuple[int, int]]:
        """Places (row, column) of the table that could be measured and were not."""
        return [
            (row, column)
            for row, queries in enumerate(self.queries)
            for column, keys in enumerate(self.keys)
            if keys >= queries
            and None in (self.forward_tflops[row][column], self.backward_tflops[row][column])
        ]

    @property
    def forward_errors(self) -> Errors | None:
        return _errors([call.forward_error for call in self.held_out])

    @property
    def backward_errors(self) -> Errors | None:
        return _errors([call.backward_error for call in self.held_out])

    def with_rates(self, row: int, column: int, forward: float, backward: float) -> Profile:
        """The same with one more shape measured."""
        return replace(
            self,
            forward_tflops=_put(self.forward_tflops, row, column, forward),
            backward_tflops=_put(self.backward_tflops, row, column, backward),
        )

    def check_continues(self, fresh: Profile) -> None:
        """Whether more of ``fresh``, which is still empty, can be measured into this one."""
        for one in SETTING:
            there, here = getattr(self, one), getattr(fresh, one)
            if there != here:
                raise ValueError(
                    f"profile {self.name} was begun with {one} {_words(there)}, but here it is"
                    f" {_words(here)}: choose another --out, or delete the file"
                )

    @classmethod
    def read(cls, name: str) -> Profile:
        """A shipped profile's name, or a file's path. OSError if there is neither."""
        shipped = resources.files("distca.planning.costs") / "profiles" / f"{name}.json"
        try:
            source = shipped if shipped.is_file() else Path(name)
            record = json.loads(source.read_text())
        except ValueError as error:
            raise ValueError(f"profile {name} is not JSON: {error}") from None
        if not isinstance(record, dict):
            raise ValueError(f"profile {name} holds no JSON object: see docs/profile.md")
        try:
            return cls.from_json(record)
        except ValueError as error:
            raise ValueError(f"profile {name}: {error}") from None

    def write(self, path: Path) -> None:
        """Whole or not at all, so that an interruption leaves what was there before."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        partial.write_text(_pretty(self.to_json()))
        partial.replace(path)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Profile:
        """What ``to_json`` gave; all but name, grid and rates may be missing."""
        try:
            given = {key: value for key, value in record.items() if value is not None}
            for key in ("name", "queries", "keys", "forward_tflops", "backward_tflops"):
                if key not in given:
                    raise ValueError(f"{key!r} is missing")
            for key in ("queries", "keys"):
                given[key] = tuple(map(_whole, given[key]))
            for key in ("forward_tflops", "backward_tflops"):
                given[key] = tuple(tuple(map(_rate, row)) for row in given[key])
            given["exchange"] = tuple(_made(Exchange, one) for one in given.get("exchange", ()))
            given["held_out"] = tuple(map(_held_out, given.get("held_out", ())))
            return _made(cls, given)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"the profile is not usable ({error}): {NEEDED}") from None

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"exchange": [asdict(one) for one in self.exchange] or None}


def _is_rate(value: float) -> bool:
    return value > 0 and math.isfinite(value)


def _rate(value: Any) -> float | None:
    return None if value is None else float(value)


def _whole(value: Any) -> int:
    if int(value) != value:
        raise ValueError(f"{value!r} is no whole number")
    return int(value)


def _made(kind: type[_Record], record: Mapping[str, Any]) -> _Record:
    """What it does not know it leaves: other versions may say more."""
    known = {one.name for one in fields(kind)}  # type: ignore[arg-type]
    return kind(**{key: value for key, value in record.items() if key in known})


def _held_out(record: Mapping[str, Any]) -> HeldOut:
    tasks = {key: tuple(map(_whole, record[key])) for key in ("queries", "keys")}
    return _made(HeldOut, {**record, **tasks})


def _put(rates: Rates, row: int, column: int, rate: float) -> Rates:
    changed = (*rates[row][:column], rate, *rates[row][column + 1 :])
    return (*rates[:row], changed, *rates[row + 1 :])


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        return " ".join(f"{name} {version}" for name, version in value.items()) or "unknown"
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value) or "unknown"


def _errors(found: list[float]) -> Errors | None:
    return Errors(median(found), max(found)) if found else None


def _pretty(record: Mapping[str, Any]) -> str:
    """A line for each key, and one for each row of a table: people look into it."""
    lines = []
    for key, value in record.items():
        if isinstance(value, list | tuple) and value and not isinstance(value[0], int):
            rows = ",\n".join(f"    {json.dumps(row)}" for row in value)
            lines.append(f"  {json.dumps(key)}: [\n{rows}\n  ]")
        else:
            lines.append(f"  {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"
