"""The loads of ranks while a schedule is made, and which servers can take how much more."""

from __future__ import annotations

import bisect
from copy import copy
from typing import NamedTuple

import numpy as np

from distca.planning.spans import Ints


class Headroom(NamedTuple):
    """The load that a server can still take. Sorts by load, then by server."""

    load: int
    server: int


class Loads:
    """The load of every rank, and the servers with headroom in sorted order."""

    capacity: Ints  # [ranks]
    headrooms: list[Headroom]

    def __init__(self, per_rank: Ints, capacity: Ints, serving: Ints) -> None:
        self.per_rank, self._servers = per_rank, serving
        self._serving = frozenset(serving.tolist())
        self.set_capacity(capacity)

    def copy(self) -> Loads:
        """Returns the same loads, which then change on their own; capacities are replaced only."""
        other = copy(self)
        other.per_rank, other.headrooms = self.per_rank.copy(), list(self.headrooms)
        other._headroom = list(self._headroom)
        return other

    def set_capacity(self, capacity: Ints) -> None:
        """Changes what ranks may have, and with it the headroom of every server."""
        self.capacity = capacity
        self._headroom: list[int] = (capacity - self.per_rank).tolist()  # looked up one by one
        headroom = (capacity - self.per_rank)[self._servers]
        order = np.argsort(headroom, kind="stable")
        order = order[headroom[order] > 0]
        pairs = zip(headroom[order].tolist(), self._servers[order].tolist(), strict=True)
        self.headrooms = [Headroom(load, server) for load, server in pairs]

    def serves(self, rank: int) -> bool:
        return rank in self._serving

    @property
    def above_capacity(self) -> Ints:
        """[ranks] Load minus capacity: positive on ranks with a surplus."""
        return self.per_rank - self.capacity

    def headroom(self, rank: int) -> int:
        """Returns the load that the rank can still take; negative if it has a surplus."""
        return self._headroom[rank]

    def surplus(self, rank: int) -> int:
        return max(-self._headroom[rank], 0)

    def add(self, ranks: Ints, loads: Ints) -> None:
        """Adds loads, which may be negative, and keeps the servers sorted."""
        change = np.zeros_like(self.per_rank)
        np.add.at(change, ranks, loads)
        changed = np.flatnonzero(change)
        for rank, load in zip(changed.tolist(), change[changed].tolist(), strict=True):
            self._add(rank, load)

    def move(self, load: int, source: int, target: int) -> None:
        """Moves a load from one rank to another one."""
        self._add(source, -load)
        self._add(target, load)

    def _add(self, rank: int, load: int) -> None:
        index = bisect.bisect_left(self.headrooms, (self._headroom[rank], rank))
        if index < len(self.headrooms) and self.headrooms[index].server == rank:
            del self.headrooms[index]
        self._headroom[rank] -= load
        if self._headroom[rank] > 0 and self.serves(rank):
            bisect.insort(self.headrooms, Headroom(self._headroom[rank], rank))
        self.per_rank[rank] += load
