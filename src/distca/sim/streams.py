"""Time on every lane at once: a compute stream, a port, and exchanges between lanes.

A lane computes one thing after the other and sends one thing after the other; both go on side by
side. Arrays have one entry for each lane, so one line of a program runs on all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from distca.planning.spans import Floats, Ints
from distca.sim.cluster import Cluster


@dataclass(frozen=True, eq=False)
class Exchange:
    """Lanes that send to each other, and how long each one's port needs for its part."""

    seconds: Floats  # [lanes]
    partner: Ints  # of lane 0, of lane 1, ...; each lane is a partner of itself
    first: Ints  # [lanes] where a lane's partners begin
    num_bytes: int

    @classmethod
    def between(
        cls, source: Ints, target: Ints, num_bytes: Ints, cluster: Cluster, tp: int, lanes: int
    ) -> Exchange | None:
        """Point to point, at the ports of both ends; None where nothing is sent."""
        sent = num_bytes > 0
        if not sent.any():
            return None
        source, target, num_bytes = source[sent], target[sent], num_bytes[sent]
        node = cluster.node(lanes, tp)
        near = node[source] == node[target]
        seconds = np.zeros(lanes)
        for link, chosen in ((cluster.inside, near), (cluster.across, ~near)):
            for end in (source, target):
                load = count(end[chosen], num_bytes[chosen], lanes)
                seconds = np.maximum(seconds, link.seconds(load))
        return cls(seconds, *_partners(source, target, lanes), int(num_bytes.sum()))

    @classmethod
    def within(cls, group: Ints, seconds: Floats, num_bytes: int) -> Exchange:
        """A collective of all lanes with the same number in ``group``; -1 takes no part."""
        lanes = np.arange(len(group))
        own = group.max(initial=-1) + 1 + lanes  # a group of one for each lane without a part
        number = np.where(group >= 0, group, own)
        order, count = np.argsort(number, kind="stable"), np.bincount(number)
        size = count[number]
        first = np.cumsum(size) - size
        inside = np.arange(int(size.sum())) - np.repeat(first, size)
        partner = order[np.repeat((np.cumsum(count) - count)[number], size) + inside]
        return cls(np.where(group >= 0, seconds, 0.0), partner, first, num_bytes)

    def latest(self, times: Floats) -> Floats:
        """The last of a lane's partners."""
        result: Floats = np.maximum.reduceat(times[self.partner], self.first)
        return result


def count(lane: Ints, weight: Ints | Floats, lanes: int) -> Floats:
    """Sums of ``weight`` on every lane."""
    return np.bincount(lane, weight, minlength=lanes).astype(np.float64)


def _partners(source: Ints, target: Ints, lanes: int) -> tuple[Ints, Ints]:
    own = np.arange(lanes, dtype=np.int64)
    pairs = np.unique(np.concatenate([source * lanes + target, target * lanes + source,
                                      own * lanes + own]))  # fmt: skip
    lane, partner = np.divmod(pairs, lanes)
    return partner, np.searchsorted(lane, own)


@dataclass(frozen=True, eq=False)
class Event:
    """Something on a stream of every lane; where start and stop are equal, nothing happened."""

    stream: str
    what: str
    start: Floats
    stop: Floats


class Streams:
    """A program's time on all lanes.

    alone: every lane by itself, as if its partners were always ready; what a replay measures.
    """

    def __init__(
        self,
        speed: Floats,
        *,
        jitter: float = 0.0,
        link_jitter: float = 0.0,
        alone: bool = False,
        record: bool = False,
        seed: int | Sequence[int] = 0,
    ) -> None:
        lanes = len(speed)
        self.compute = np.zeros(lanes)  # when each compute stream is free
        self.port = np.zeros(lanes)
        self.busy = np.zeros(lanes)  # seconds of computing
        self.waited = np.zeros(lanes)  # seconds of waiting for exchanges
        self.num_bytes = 0
        self.events: list[Event] | None = [] if record else None
        self._alone, self._speed = alone, speed
        self._jitter, self._link_jitter = jitter, link_jitter
        self._draw = np.random.default_rng(seed)

    def run(self, what: str, seconds: Floats) -> None:
        """A kernel, or several; lanes without one have 0 seconds."""
        start = self.compute
        taken = self._shaken(seconds / self._speed, self._jitter)
        self.compute = start + taken
        self.busy = self.busy + taken
        self._note("compute", what, start, self.compute)

    def send(self, what: str, exchange: Exchange | None) -> Floats:
        """Starts when the compute stream gets there and the port is free; when it is done."""
        if exchange is None:
            return self.compute
        begin = np.maximum(self.compute, self.port)
        taken = self._shaken(exchange.seconds, self._link_jitter)
        done = begin + taken if self._alone else exchange.latest(begin + taken)
        takes_part = exchange.seconds > 0
        self.port = np.where(takes_part, done, self.port)
        self.num_bytes += exchange.num_bytes
        self._note("port", what, np.where(takes_part, begin, done), done)
        return np.where(takes_part, done, self.compute)

    def wait(self, done: Floats) -> None:
        """The compute stream goes on when something has arrived."""
        after = np.maximum(self.compute, done)
        self.waited = self.waited + (after - self.compute)
        self.compute = after

    def _shaken(self, seconds: Floats, jitter: float) -> Floats:
        if not jitter:
            return seconds
        # Never below a third of the usual.
        factor = np.maximum(1 + jitter * self._draw.standard_normal(len(seconds)), 1 / 3)
        return seconds * factor

    def _note(self, stream: str, what: str, start: Floats, stop: Floats) -> None:
        if self.events is not None:
            self.events.append(Event(stream, what, start, stop))
