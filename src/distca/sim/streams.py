"""The time on all plan ranks at once: a compute stream and a network port for each.

A rank computes one kernel after another and sends one transfer after another; computation and
communication overlap. A transfer that is under way, or waits for its partners, may occupy a share
of the rank's SMs, which computation beside it does without. Arrays have one entry for each rank, so
one call advances all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from distca.planning.spans import Floats, Ints
from distca.sim.cluster import Cluster


@dataclass(frozen=True, eq=False)
class Transfer:
    """Communication between ranks; on each of them it ends when all its partners are done."""

    seconds: Floats  # [ranks] for which the port of each rank is busy
    partner: Ints  # the partners of rank 0, of rank 1, ...; each rank is a partner of itself
    first: Ints  # [ranks] the index of each rank's first partner
    num_bytes: int  # sent by all ranks

    @classmethod
    def between(
        cls, source: Ints, target: Ints, num_bytes: Ints, cluster: Cluster, tp: int, ranks: int
    ) -> Transfer | None:
        """Returns point-to-point communication between ranks; None if nothing is sent."""
        sent = num_bytes > 0
        if not sent.any():
            return None
        source, target, num_bytes = source[sent], target[sent], num_bytes[sent]
        node = cluster.node(ranks, tp)
        near = node[source] == node[target]
        seconds = np.zeros(ranks)
        for link, chosen in ((cluster.inside, near), (cluster.across, ~near)):
            for end in (source, target):
                load = count(end[chosen], num_bytes[chosen], ranks)
                seconds = np.maximum(seconds, link.seconds(load))
        return cls(seconds, *_partners(source, target, ranks), int(num_bytes.sum()))

    @classmethod
    def within(cls, group: Ints, seconds: Floats, num_bytes: int) -> Transfer:
        """Returns a collective of the ranks with equal numbers in ``group``; -1 is no group."""
        # Each rank without a group gets one of its own.
        own = group.max(initial=-1) + 1 + np.arange(len(group))
        number = np.where(group >= 0, group, own)
        order, count = np.argsort(number, kind="stable"), np.bincount(number)
        size = count[number]
        first = np.cumsum(size) - size
        inside = np.arange(int(size.sum())) - np.repeat(first, size)
        partner = order[np.repeat((np.cumsum(count) - count)[number], size) + inside]
        return cls(np.where(group >= 0, seconds, 0.0), partner, first, num_bytes)

    def latest(self, times: Floats) -> Floats:
        """Returns the latest of the partners' times on each rank."""
        result: Floats = np.maximum.reduceat(times[self.partner], self.first)
        return result


def least_factor(jitter: float) -> float:
    """Returns the least factor by which jitter changes the time of a kernel or a transfer.

    Far from zero, so that time goes on. Six deviations hardly occur, but bound what a step takes.
    """
    return max(1 - 6 * jitter, 1 / 3)


def count(rank: Ints, weight: Ints | Floats, ranks: int) -> Floats:
    """Returns the sum of ``weight`` on each rank."""
    return np.bincount(rank, weight, minlength=ranks).astype(np.float64)


def _partners(source: Ints, target: Ints, ranks: int) -> tuple[Ints, Ints]:
    own = np.arange(ranks, dtype=np.int64)
    pairs = np.unique(np.concatenate([source * ranks + target, target * ranks + source,
                                      own * ranks + own]))  # fmt: skip
    rank, partner = np.divmod(pairs, ranks)
    return partner, np.searchsorted(rank, own)


@dataclass(frozen=True, eq=False)
class Event:
    """An operation on a stream of every rank; none on ranks where start and stop are equal."""

    stream: str
    what: str
    start: Floats
    stop: Floats


class Streams:
    """The streams of all plan ranks.

    jitter, link_jitter, transfer_sms: as those of a ``Cluster``.
    isolated: simulates every rank as if its partners were always ready, as a replay measures it.
    record: keeps an event for every operation.
    """

    def __init__(
        self,
        speed: Floats,
        *,
        jitter: float = 0.0,
        link_jitter: float = 0.0,
        transfer_sms: float = 0.0,
        isolated: bool = False,
        record: bool = False,
        seed: int | Sequence[int] = 0,
    ) -> None:
        ranks = len(speed)
        self.compute = np.zeros(ranks)  # when each compute stream is free
        self.port = np.zeros(ranks)
        self.busy = np.zeros(ranks)  # seconds of computing
        self.waited = np.zeros(ranks)  # seconds of waiting for transfers
        self.num_bytes = 0
        self.events: list[Event] | None = [] if record else None
        self._isolated, self._speed = isolated, speed
        self._jitter, self._link_jitter = jitter, link_jitter
        self._transfer_sms = transfer_sms
        self._draw = np.random.default_rng(seed)

    @classmethod
    def on(
        cls,
        cluster: Cluster,
        speed: Floats,
        *,
        record: bool = False,
        seed: int | Sequence[int] = 0,
    ) -> Streams:
        """Returns streams that deviate from ideal ones as the GPUs and links of a cluster do."""
        return cls(
            speed,
            jitter=cluster.jitter,
            link_jitter=cluster.link_jitter,
            transfer_sms=cluster.transfer_sms,
            record=record,
            seed=seed,
        )

    def run(self, what: str, seconds: Floats) -> None:
        """Runs kernels on the compute stream, 0 seconds on ranks without any."""
        start = self.compute
        alone = self._with_jitter(seconds / self._speed, self._jitter)
        taken = alone + self._lost_to_transfers(alone)
        self.compute = start + taken
        self.busy = self.busy + taken
        self._record("compute", what, start, self.compute)

    def send(self, what: str, transfer: Transfer | None) -> Floats:
        """Starts a transfer when compute stream and port are free; returns when it is done."""
        if transfer is None:
            return self.compute
        begin = np.maximum(self.compute, self.port)
        taken = self._with_jitter(transfer.seconds, self._link_jitter)
        done = begin + taken if self._isolated else transfer.latest(begin + taken)
        takes_part = transfer.seconds > 0
        self.port = np.where(takes_part, done, self.port)
        self.num_bytes += transfer.num_bytes
        self._record("port", what, np.where(takes_part, begin, done), done)
        return np.where(takes_part, done, self.compute)

    def wait(self, done: Floats) -> None:
        """Blocks the compute stream of each rank until a time."""
        after = np.maximum(self.compute, done)
        self.waited = self.waited + (after - self.compute)
        self.compute = after

    def mark(self, what: str, since: Floats, ranks: slice) -> None:
        """Records what some ranks have done since a time, above what their streams have done."""
        start = self.compute.copy()
        start[ranks] = since[ranks]
        self._record("tick", what, start, self.compute)

    def _lost_to_transfers(self, alone: Floats) -> Floats:
        """Returns seconds that kernels take longer than alone, because transfers occupy SMs."""
        share = self._transfer_sms
        slowed = alone / (1 - share)  # if a transfer is under way until the end
        under_way = np.maximum(self.port - self.compute, 0.0)
        lost: Floats = share * np.minimum(slowed, under_way)
        return lost

    def _with_jitter(self, seconds: Floats, jitter: float) -> Floats:
        if not jitter:
            return seconds
        factor = 1 + jitter * self._draw.standard_normal(len(seconds))
        return seconds * np.maximum(factor, least_factor(jitter))

    def _record(self, stream: str, what: str, start: Floats, stop: Floats) -> None:
        if self.events is not None:
            self.events.append(Event(stream, what, start, stop))
