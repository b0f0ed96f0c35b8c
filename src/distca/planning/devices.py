"""What each rank can do for a plan: its speed, memory, node and other work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from distca.planning.costs.base import PS
from distca.planning.spans import Floats, Ints
from distca.schema import is_number, shown

UNLIMITED = 1 << 62
FASTEST = 1e6  # and the slowest is 1 / FASTEST, so that picoseconds stay within 64 bits
_LIMITS: dict[str, tuple[type, float]] = {
    "node": (np.int64, UNLIMITED),
    "memory_bytes": (np.int64, UNLIMITED),
    "speed": (np.float64, FASTEST),
    "busy_s": (np.float64, 1e6),  # eleven days
}


@dataclass(frozen=True, eq=False)
class Devices:
    """All ranks of a plan: the workers 0..W-1, then the dedicated servers.

    A rank of speed 0 computes no attention, such as a worker beside dedicated servers. A slower GPU
    has a smaller speed. A rank with other work starts its attention after ``busy_s`` seconds.
    """

    num_workers: int
    speed: Floats  # [ranks] relative to the device that the cost model describes
    memory_bytes: Ints  # [ranks] limit for one layer's q, k, v and o, local and received
    node: Ints  # [ranks]
    busy_s: Floats  # [ranks]

    def __post_init__(self) -> None:
        ranks = np.asarray(self.node).size
        for name, (kind, most) in _LIMITS.items():
            values = np.asarray(getattr(self, name))
            if values.shape != (ranks,):
                raise ValueError(
                    f"{values.size} values of {name} for {ranks} ranks: give one for each"
                )
            if values.dtype.kind in "iuf":
                fits = (values >= 0) & (values <= most)  # False for NaN
            else:
                fits = np.array([is_number(one, 0, most) for one in values.tolist()], bool)
            if not fits.all():
                wrong = shown(values[~fits].tolist()[0])
                raise ValueError(f"{name} = {wrong}: give each rank a number from 0 to {most:.3g}")
            object.__setattr__(self, name, values.astype(kind))
        if not np.any(self.speed > 0):
            raise ValueError("no rank computes attention: give at least one a speed above 0")
        slowest = float(self.speed[self.speed > 0].min())
        if slowest < 1 / FASTEST:
            raise ValueError(f"speed = {slowest}: give each rank 0, or at least {1 / FASTEST:g}")

    @classmethod
    def of(
        cls,
        num_workers: int,
        dedicated: int = 0,
        *,
        workers_serve: bool | None = None,
        speed: Sequence[float] | Floats | None = None,
        memory_bytes: int | None = None,
        ranks_per_node: int | None = None,
        busy_s: Sequence[float] | Floats | None = None,
    ) -> Devices:
        """Fills in defaults.

        Workers serve in place, unless there are dedicated servers and ``workers_serve`` is not set.
        """
        ranks = num_workers + dedicated
        if dedicated < 0:
            raise ValueError(f"{dedicated} dedicated servers: give 0 or more")
        if ranks_per_node is not None and ranks_per_node < 1:
            raise ValueError(f"{ranks_per_node} ranks per node: give 1 or more")
        speeds = np.ones(ranks) if speed is None else _as_given(speed)
        if not (workers_serve or (workers_serve is None and dedicated == 0)):
            speeds[:num_workers] = 0.0
        return cls(
            num_workers=num_workers,
            speed=speeds,
            memory_bytes=np.full(ranks, UNLIMITED if memory_bytes is None else memory_bytes),
            node=np.arange(ranks) // (ranks_per_node or ranks),
            busy_s=np.zeros(ranks) if busy_s is None else _as_given(busy_s),
        )

    @cached_property
    def workers_only(self) -> Devices:
        """The workers alone; if none of them serves, all of them with speed 1."""
        workers = slice(self.num_workers)
        speed = self.speed[workers] if self.workers_serve else np.ones(self.num_workers)
        return Devices(
            self.num_workers,
            speed,
            self.memory_bytes[workers],
            self.node[workers],
            self.busy_s[workers],
        )

    @property
    def num_ranks(self) -> int:
        return len(self.speed)

    @property
    def workers_serve(self) -> bool:
        """Whether any worker computes attention."""
        return bool(np.any(self.speed[: self.num_workers]))

    @cached_property
    def serving(self) -> Ints:
        """Ranks that compute attention."""
        return np.flatnonzero(self.speed > 0)

    @cached_property
    def equally_fast(self) -> bool:
        """Whether all ranks that compute attention have the same speed."""
        return len(set(self.speed[self.serving].tolist())) <= 1

    @cached_property
    def busy_ps(self) -> Ints:
        return np.rint(self.busy_s * PS).astype(np.int64)

    @cached_property
    def _divisor(self) -> Floats:
        """[ranks] The speed, or 1 where it is 0."""
        return np.where(self.speed > 0, self.speed, 1.0)

    @cached_property
    def _are_plain(self) -> bool:
        """Whether loads are finishing times, as those of ranks of speed 1 without other work."""
        return bool(np.all(self._divisor == 1.0)) and not self.busy_ps.any()

    @cached_property
    def _totals(self) -> tuple[float, float]:
        """The speeds of all ranks together, and their other work at speed 1 in picoseconds."""
        return float(np.sum(self.speed)), float(np.sum(self.speed * self.busy_ps))

    def finish_ps(self, load: Ints, rank: int | slice | Ints = slice(None)) -> Ints:
        """Returns finishing times, of each rank [ranks], or of loads on the ranks named."""
        if self._are_plain:
            return load.copy()
        finish: Ints = self.busy_ps[rank] + np.ceil(load / self._divisor[rank]).astype(np.int64)
        return finish

    def mean_ps(self, total_load: int) -> float:
        """Returns the mean finishing time, weighted by speed, when all would finish together."""
        speed, busy = self._totals
        return (busy + float(total_load)) / speed

    def capacity(self, total_load: int, tolerance: float) -> Ints:
        """[ranks] Returns the load with which a rank finishes at (1 + tolerance) x mean."""
        latest = np.floor((1.0 + tolerance) * self.mean_ps(total_load))
        load: Ints = np.maximum((latest - self.busy_ps) * self.speed, 0.0).astype(np.int64)
        return load

    def imbalance(self, load: Ints) -> float:
        """Returns the worst finishing time over the mean, or 1.0 if there is no load."""
        mean = self.mean_ps(int(load.sum()))
        return float(self.finish_ps(load).max()) / mean if mean > 0 else 1.0


def _as_given(values: Sequence[float] | Floats) -> Floats:
    """Returns a copy of values as an array of objects, to be checked, if they are no array yet.

    NumPy would make numbers of truth values, and text of all numbers beside a text.
    """
    return np.atleast_1d(np.array(values, None if isinstance(values, np.ndarray) else object))
