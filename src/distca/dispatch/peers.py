"""The ranks of a group as one of them sees them over the host, beside the data that they exchange.

Ranks announce what they are about to do, and learn within milliseconds when one of them is lost.
Collectives cannot tell: NCCL waits for a dead rank until its timeout, and gloo knows only that some
connection was closed. The channel has its own connections, to a hub on the first rank
(``distca.dispatch.hub``), so that it works whatever the device and the process groups do.
"""

from __future__ import annotations

import atexit
import logging
import sys
from collections.abc import Callable, Collection, Sequence
from functools import partial
from threading import Condition, Lock, Thread, Timer, current_thread
from weakref import WeakKeyDictionary

import torch.distributed as dist

from distca.dispatch.announcements import Announcement, Announcements
from distca.dispatch.hub import LOST, Hub
from distca.dispatch.hub_address import HubAddress, reach_hub
from distca.dispatch.hub_connection import HubConnection
from distca.dispatch.peer_news import Members, PeerLostError
from distca.dispatch.transports.base import ExchangeError, Records

_CLOSE_S = 1.0
_TOGETHER_S = 1.0  # in which ranks that fail for the same reason all do so, each with its own words
_log = logging.getLogger(__name__)
_of_group: WeakKeyDictionary[dist.ProcessGroup, Peers] = WeakKeyDictionary()


class Peers:
    """This rank's connection to the hub; use ``Peers.of``.

    ranks: the global rank of every rank of the group, as errors name it.
    lost: set as soon as a rank is lost.
    losses: all ranks that are lost, in the order of the news.
    address: that of the hub.
    num_candidates: how many processes wait to become ranks; known to the first rank.
    is_over: whether the hub has ended, since the first rank has left with a word.
    number: that of a candidate.
    cancelled: the names of groups that somebody has given up to make, and the global rank of that
        one, or minus the number of the candidate.
    abandoned: collectives that a rank does not wait for any more, because another one is lost.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        hub: Hub | None,
        connection: HubConnection | None,
        address: HubAddress | None = None,
    ) -> None:
        self.address = address
        self.num_candidates = 0
        self.number: int | None = None
        self.is_over = False
        self.cancelled: set[tuple[str, int]] = set()
        self.lost: PeerLostError | None = None
        self.losses: list[PeerLostError] = []
        self.abandoned: list[dist.Work] = []
        self._ranks = ranks
        self._hub, self._connection = hub, connection
        self._lock = Lock()
        self._changed = Condition(self._lock)
        self._announcements = Announcements(self._changed)
        self._callbacks: list[Callable[[PeerLostError], None]] = []
        self._members: Members | None = None
        self._closing = connection is None
        if connection is not None:
            atexit.register(self.close)
            listen = partial(self._listen, connection)
            self._listener = Thread(target=listen, name="distca peers", daemon=True)
            self._listener.start()

    @classmethod
    def of(cls, group: dist.ProcessGroup, *, alone: bool = False) -> Peers:
        """Returns the peers of a group; at the first request all its ranks must ask.

        alone: whether a single rank has a hub too, so that others can join it.
        """
        if group not in _of_group:
            ranks = dist.get_process_group_ranks(group)
            hub = reach_hub(group) if len(ranks) > 1 or alone else (None, None, None)
            _of_group[group] = cls(ranks, *hub)
        return _of_group[group]

    @classmethod
    def as_candidate(cls, ranks: Sequence[int], address: HubAddress, wish: int | None) -> Peers:
        """Returns the peers of a process that is no rank yet (``members`` waits to become one).

        ranks: those of the group.
        wish: the number that it would like to have, if it is free.
        """
        return cls(ranks, None, address.connect("candidate", wish), address)

    def announce(self, record: str) -> Announcement:
        """Tells all ranks what this one is about to do; the result is what each of them does.

        It is ``[record]`` if all of them do the same. It raises ExchangeError if a rank has ended.
        Records are sent by ``flush``, several at once.
        """
        with self._lock:
            if self._connection is None:
                return self._announcements.answered(record, [record])
            if self.lost is not None or self.is_over:
                return self._announcements.answered(record, self.lost or self._left())
            return self._announcements.add(record)

    def note(self, record: str) -> None:
        """Announces a record for which nobody waits alone: see ``take_noted``."""
        with self._lock:
            if self._connection is not None:
                self._announcements.note(record)

    def take_noted(self) -> list[Announcement]:
        """Sends what was announced, and returns what was noted since the last call."""
        self.flush()
        with self._lock:
            return self._announcements.take_noted()

    def flush(self) -> None:
        if self._announcements.unsent:
            with self._changed:
                self._send("records", *self._announcements.take_unsent())
                if self.lost is not None or self.is_over:  # since then nobody answers
                    self._announcements.fail(self.lost or self._left())

    def wait(self, announcement: Announcement, timeout_s: float) -> Records:
        """Returns the records of all ranks; after so many seconds of those that have come."""
        self.flush()
        try:
            return announcement.result(timeout_s)
        except TimeoutError:
            with self._changed:
                if not announcement.is_answered:
                    first = self._announcements.first_open(announcement)
                    self._send("late", first, timeout_s)
            return announcement.result()

    def on_loss(self, callback: Callable[[PeerLostError], None]) -> None:
        """Calls back, in another thread, as soon as a rank is lost; now for those that are."""
        with self._changed:
            self._callbacks.append(callback)
            known = list(self.losses)
        for lost in known:
            callback(lost)

    def regroup(self, *, admit: bool = False) -> Members:
        """Returns who is left, once all of them have asked.

        admit: whether candidates become members; all ranks ask for the same.
        All get the same answer. Raises PeerLostError if the first rank is lost, and the hub with
        it.
        """
        with self._changed:
            self._members = None
            self._send("regroup", admit)
        members = self.members(None)
        if members is None:
            raise self.losses[-1] if self.losses else self._left()
        return members

    def members(self, timeout_s: float | None) -> Members | None:
        """Waits until the ranks make their groups again; returns None if the hub ends before."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._members is not None or self._has_lost(0) or self.is_over, timeout_s
            )
            return self._members

    def cancel(self, name: str) -> None:
        """Tells all members that this rank does not make the groups of this name."""
        with self._changed:
            self._send("cancel", name)

    def watch_answers(self, ranks: Collection[int], seconds: float) -> None:
        """Lets the hub lose global ranks that live but do not answer for so many seconds."""
        with self._changed:
            self._send("watch", [list(self._ranks).index(rank) for rank in ranks], seconds)

    def tell_lost(self, number: int) -> None:
        """Tells the hub that a global rank is lost, which may not have connected to it yet."""
        if number in self._ranks:
            with self._changed:
                self._send("missing", list(self._ranks).index(number))

    def _has_lost(self, rank: int) -> bool:
        return any(lost.rank == self._ranks[rank] for lost in self.losses)

    def lost_within(self, seconds: float, besides: Collection[int] = ()) -> PeerLostError | None:
        """Waits for the news of a lost rank, which may follow the failure of a collective.

        besides: global ranks whose loss does not count.
        """

        def first() -> PeerLostError | None:
            return next((lost for lost in self.losses if lost.rank not in besides), None)

        with self._changed:
            self._changed.wait_for(lambda: first() is not None or self._closing, seconds)
            return first()

    def fail(self, sentence: str) -> None:
        """Leaves the group, and tells the others why."""
        self._leave("failed", sentence)

    def close(self) -> None:
        """Leaves the group; after an exception that nobody has caught, tells the others."""
        error = getattr(sys, "last_value", None)
        if error is None:
            self._leave("bye")
        else:
            self.fail(f"{type(error).__name__}: {error}")

    def drop(self) -> None:
        """Closes the connection without a word, as a broken network does.

        The other ranks lose this one, which does not notice it: it waits for their answers.
        """
        atexit.unregister(self.close)
        with self._changed:
            self._closing = True
        if self._connection is not None:
            self._connection.drop()

    def _leave(self, *last_message: object) -> None:
        atexit.unregister(self.close)
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._callbacks.clear()  # they hold on to groups, as do the frames of errors
            for lost in self.losses:
                lost.__traceback__ = lost.__cause__ = lost.__context__ = None
            self._send(*last_message)
        assert self._connection is not None
        self._connection.end_sending()
        if self._hub is not None:
            self._hub.wait()
        if self._listener is not current_thread():
            self._listener.join(_CLOSE_S)
        self._connection.close()

    def _send(self, *message: object) -> None:
        if self._connection is not None:
            self._connection.send(*message)

    def _listen(self, connection: HubConnection) -> None:
        for message in connection.messages():
            match message:
                case ["same", last]:
                    with self._changed:
                        self._announcements.answer_through(last)
                case ["records", index, records, why]:
                    answer = ExchangeError(why, records) if None in records else records
                    with self._changed:
                        self._announcements.answer(index, answer)
                case ["lost", rank, how]:
                    self._lose(rank, how)
                case ["members", ranks, candidates, name]:
                    left = [self._ranks[rank] for rank in ranks]
                    with self._changed:
                        self._members = Members(left, candidates, name)
                        self._changed.notify_all()
                case ["candidate", number]:
                    self.number = number
                case ["candidates", number]:
                    self.num_candidates = number
                case ["cancelled", name, who]:
                    known = who < len(self._ranks)
                    self.cancelled.add((name, self._ranks[who] if known else -who))
                case ["ping"]:
                    with self._changed:
                        self._send("pong")
                case ["failed", rank, sentence]:
                    timer = Timer(_TOGETHER_S, self._lose, (rank, f"it failed: {sentence}"))
                    timer.daemon = True
                    timer.start()
                case ["bye"]:
                    self._end()
                    return
        self._lose(0, LOST)

    def _end(self) -> None:
        """Raises where this rank still waits for an answer of the hub, which has ended."""
        with self._changed:
            self.is_over = True
            self._announcements.fail(self._left())

    def _left(self) -> ExchangeError:
        return ExchangeError(f"rank {self._ranks[0]} has left")

    def _lose(self, rank: int, how: str) -> None:
        number = self._ranks[rank]
        error = PeerLostError(f"rank {number} is lost ({how})", number, how)
        with self._changed:
            if self._closing or self._has_lost(rank):
                return
            self.lost = self.lost or error
            self.losses.append(error)
            callbacks = list(self._callbacks)
            self._announcements.fail(error)
        _log.error("%s: this run cannot go on", error)
        for callback in callbacks:
            callback(error)


def drop_connections() -> None:
    """Drops the connections of this process to the hubs of all its groups."""
    for peers in list(_of_group.values()):
        peers.drop()
