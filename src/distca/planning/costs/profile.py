"""Profiles: measured rates of a device, in one JSON file for the planner and the simulator.

``distca profile`` writes the file, ``table_cost`` makes a cost model of it, and docs/profile.md
explains it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from functools import cache
from importlib import resources
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Literal

from distca.planning.costs.published import MEASURED, PUBLISHED, PublishedRates, published_rates
from distca.schema import build

DEFAULT_COST = "h200"  # the profile that plans use by default
NEEDED = (
    "it needs name, queries, keys, and forward_tflops and backward_tflops as one row of rates per"
    " query count"
)
SETTING = (
    "device", "backend", "dtype", "ranks", "heads", "kv_heads", "head_dim", "hidden", "ffn",
    "queries", "keys", "tile", "versions",
)  # fmt: skip
_PROFILES = resources.files("distca.planning.costs") / "profiles"
# From slow CPUs to far above all GPUs. Beyond these limits, units are mistaken, and costs overflow.
TFLOPS = (1e-4, 1e6)
LIMITS = {
    "linear_tflops": TFLOPS,
    "sustained": (0.01, 1.0),
    "copy_bytes_per_s": (1e6, 1e16),
    "tile": (1, 1 << 16),
}
Rates = tuple[tuple[float | None, ...], ...]  # TFLOP/s, a row for each query count
Direction = Literal["forward", "backward"]


@dataclass(frozen=True)
class MeasuredExchange:
    """An all-to-all in which every rank sends ``bytes`` in total to the other ranks."""

    bytes: int
    bytes_per_s: float


@dataclass(frozen=True)
class HeldOut:
    """A fused call that is not part of the table: its measured and its predicted time.

    The call has the tasks (queries[i], keys[i]), each of them ``repeat`` times.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    repeat: int
    forward_s: float
    backward_s: float
    forward_predicted_s: float
    backward_predicted_s: float

    def error(self, direction: Direction) -> float:
        """Returns the error of the prediction, relative to the measurement."""
        predicted, measured = (getattr(self, f"{direction}{end}") for end in ("_predicted_s", "_s"))
        return float(abs(predicted / measured - 1))


@dataclass(frozen=True)
class Profile:
    """Rates of causal tasks over (queries, keys), and the setting in which they were measured.

    A rate is None where there are fewer keys than queries, or where nothing was measured yet.
    """

    name: str
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    forward_tflops: Rates
    backward_tflops: Rates
    tile: int = 1  # query rows that the kernel computes together
    device: str = ""
    backend: str = ""
    dtype: str = ""
    ranks: int = 1  # number of ranks that measured at the same time; figures are their mean
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    hidden: int = 0
    ffn: int = 0
    date: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    linear_tflops: float | None = None  # linear layers, forward and backward
    sustained: float | None = None  # speed of whole layers over that of their parts alone
    copy_bytes_per_s: float | None = None  # copies on the device; each byte is read and written
    exchange: tuple[MeasuredExchange, ...] = ()  # empty if one rank measured alone
    held_out: tuple[HeldOut, ...] = ()

    def __post_init__(self) -> None:
        for what, grid in (("queries", self.queries), ("keys", self.keys)):
            ascending = all(a < b for a, b in pairwise(grid))
            if len(grid) < 2 or grid[0] <= 0 or not ascending:
                raise ValueError(
                    f"{what} = {list(grid)}: give two or more positive values in ascending order"
                )
        for rates in (self.forward_tflops, self.backward_tflops):
            shape = (len(rates), *sorted({len(row) for row in rates}))
            if shape != (len(self.queries), len(self.keys)):
                raise ValueError(
                    f"rates of shape {shape} for {len(self.queries)} x {len(self.keys)} shapes of"
                    " tasks: give one row per query count and one column per key count"
                )
            for rate in (rate for row in rates for rate in row if rate is not None):
                _check_within(TFLOPS, "a rate in TFLOP/s", rate)
        for what, (least, most) in LIMITS.items():
            if (value := getattr(self, what)) is not None:
                _check_within((least, most), what, value)

    @property
    def missing(self) -> list[tuple[int, int]]:
        """(row, column) of shapes that can be measured but were not."""
        return [
            (row, column)
            for row, queries in enumerate(self.queries)
            for column, keys in enumerate(self.keys)
            if keys >= queries
            and None in (self.forward_tflops[row][column], self.backward_tflops[row][column])
        ]

    def errors(self, direction: Direction) -> dict[str, float] | None:
        """Returns the relative errors for the held-out calls; None if there are none."""
        found = [call.error(direction) for call in self.held_out]
        return {"median": median(found), "worst": max(found)} if found else None

    def with_rates(self, row: int, column: int, forward: float, backward: float) -> Profile:
        """Returns the profile with the rates of one more shape."""
        return replace(
            self,
            forward_tflops=_put(self.forward_tflops, row, column, forward),
            backward_tflops=_put(self.backward_tflops, row, column, backward),
        )

    def check_continues(self, fresh: Profile) -> None:
        """Raises ``ValueError`` if this profile was measured in another setting than ``fresh``."""
        for name in SETTING:
            there, here = getattr(self, name), getattr(fresh, name)
            if there != here:
                raise ValueError(
                    f"profile {self.name} was begun with {name} {_words(there)}, but here it is"
                    f" {_words(here)}: choose another --out, or delete the file"
                )

    @classmethod
    def read(cls, name: str) -> Profile:
        """Reads a shipped profile by name, or a file. Raises ``OSError`` if there is neither.

        A GPU with published rates alone (``costs.published``) has a scaled profile.
        """
        if (rates := published_rates(name)) is not None:
            return cls.read(MEASURED).scaled(name, rates)
        source = _PROFILES / f"{name}.json" if is_shipped(name) else Path(name)
        try:
            record = json.loads(source.read_text())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"profile {name} is not JSON: {error}") from None
        if not isinstance(record, dict):
            raise ValueError(f"profile {name} is not a JSON object: see docs/profile.md")
        try:
            return cls.from_json(record)
        except ValueError as error:
            raise ValueError(f"profile {name}: {error}") from None

    def scaled(self, gpu: str, rates: PublishedRates) -> Profile:
        """Returns the profile of another GPU, by the published rates of both."""
        ours = PUBLISHED[MEASURED]
        compute, memory = rates.tflops / ours.tflops, rates.bytes_per_s / ours.bytes_per_s
        forward, backward = (
            tuple(tuple(rate and rate * compute for rate in row) for row in rates)
            for rates in (self.forward_tflops, self.backward_tflops)
        )
        return replace(
            self,
            name=gpu,
            device=f"{gpu}, scaled from {self.name} by published rates",
            forward_tflops=forward,
            backward_tflops=backward,
            linear_tflops=self.linear_tflops and self.linear_tflops * compute,
            copy_bytes_per_s=self.copy_bytes_per_s and self.copy_bytes_per_s * memory,
            held_out=(),
        )

    def write(self, path: Path) -> None:
        """Writes the file atomically, so that an interruption leaves the previous one intact."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        partial.write_text(_pretty(self.to_json()))
        partial.replace(path)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Profile:
        """Restores a profile from JSON; only name, queries, keys and rates are required."""
        try:
            given = _known(cls, record)
            for key, kind in (("exchange", MeasuredExchange), ("held_out", HeldOut)):
                given[key] = [_known(kind, one) for one in given.get(key, ())]
            return build(cls, given)
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ValueError(f"the profile is not usable ({error}): {NEEDED}") from None

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"exchange": [asdict(one) for one in self.exchange] or None}


def is_shipped(name: str) -> bool:
    """Returns whether a name is that of a shipped profile, or of one scaled by published rates."""
    return f"{name}.json" in _shipped_files() or published_rates(name) is not None


@cache
def _shipped_files() -> frozenset[str]:
    return frozenset(file.name for file in _PROFILES.iterdir())


def _check_within(limits: tuple[float, float], what: str, value: float) -> None:
    least, most = limits
    if not least <= value <= most:  # NaN too
        raise ValueError(f"{what} = {value:g}: it must be from {least:g} to {most:g}")


def _known(kind: type, record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of a record without unknown keys, which other versions may write."""
    known = {one.name: record.get(one.name) for one in fields(kind)}
    for one in fields(kind):
        if known[one.name] is None and one.default is one.default_factory is MISSING:
            raise ValueError(f"{one.name!r} is missing")
    return {name: value for name, value in known.items() if value is not None}


def _put(rates: Rates, row: int, column: int, rate: float) -> Rates:
    changed = (*rates[row][:column], rate, *rates[row][column + 1 :])
    return (*rates[:row], changed, *rates[row + 1 :])


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        return " ".join(f"{name} {version}" for name, version in value.items()) or "unknown"
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value) or "unknown"


def _pretty(record: Mapping[str, Any]) -> str:
    """Formats a record with one line per key and one per row of a table, for readers."""
    lines = []
    for key, value in record.items():
        if isinstance(value, list | tuple) and value and not isinstance(value[0], int):
            rows = ",\n".join(f"    {json.dumps(row)}" for row in value)
            lines.append(f"  {json.dumps(key)}: [\n{rows}\n  ]")
        else:
            lines.append(f"  {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"
