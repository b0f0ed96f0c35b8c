"""The ranks of a group as one of them sees them over the host, beside the data that they exchange.

Ranks announce what they are about to do, and learn within milliseconds when one of them is lost.
Collectives cannot tell: NCCL waits for a dead rank until its timeout, and gloo knows only that some
connection was closed. The channel has its own connections, to a hub on the first rank
(``distca.dispatch.hub``), so that it works whatever the device and the process groups do.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import secrets
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from threading import Condition, Lock, Thread, Timer, current_thread
from weakref import WeakKeyDictionary

import torch.distributed as dist

from distca.dispatch.announcement import Announcement
from distca.dispatch.hub import LINE_BYTES, LOST, Hub, encode, keep_alive, open_files
from distca.dispatch.transports.base import ExchangeError, Records

_LOOPBACK = "127.0.0.1"
_CONNECT_S = 30.0
_CLOSE_S = 1.0
_TOGETHER_S = 1.0  # in which ranks that fail for the same reason all do so, each with its own words
_log = logging.getLogger(__name__)
_of_group: WeakKeyDictionary[dist.ProcessGroup, Peers] = WeakKeyDictionary()


class PeerLostError(ExchangeError):
    """Raised when a rank has ended, or its node is gone, while others still need it.

    rank: its global rank.
    how: in words.
    noticed_at: when this rank noticed it, in seconds since 1970.
    """

    def __init__(self, message: str, rank: int, how: str = LOST) -> None:
        super().__init__(message)
        self.rank, self.how, self.noticed_at = rank, how, time.time()


class Peers:
    """This rank's connection to the hub; use ``Peers.of``.

    ranks: the global rank of every rank of the group, as errors name it.
    lost: set as soon as a rank is lost.
    losses: all ranks that are lost, in the order of the news.
    abandoned: collectives that a rank does not wait for any more, because another one is lost.
    """

    def __init__(
        self, ranks: Sequence[int], hub: Hub | None, connection: socket.socket | None
    ) -> None:
        self.lost: PeerLostError | None = None
        self.losses: list[PeerLostError] = []
        self.abandoned: list[dist.Work] = []
        self._ranks = ranks
        self._hub, self._connection = hub, connection
        self._changed = Condition(Lock())
        self._waiting: deque[Announcement] = deque()  # by index
        self._num_announced, self._unsent = 0, list[str]()
        self._callbacks: list[Callable[[PeerLostError], None]] = []
        self._survivors: list[int] | None = None
        self._closing = connection is None
        if connection is not None:
            keep_alive(connection)
            atexit.register(self.close)
            self._listener = Thread(target=self._listen, name="distca peers", daemon=True)
            self._listener.start()

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Peers:
        """Returns the peers of a group; at the first request all its ranks must ask."""
        if group not in _of_group:
            _of_group[group] = _connect(group)
        return _of_group[group]

    def announce(self, record: str) -> Announcement:
        """Tells all ranks what this one is about to do; the result is what each of them does.

        It is ``[record]`` if all of them do the same. It raises ExchangeError if a rank has ended.
        Records are sent by ``flush``, several at once.
        """
        with self._changed:
            announcement = Announcement(self._num_announced, record, self._changed)
            if self._connection is None:
                announcement.answer([record])
            elif self.lost is not None:
                announcement.answer(self.lost)
            else:
                self._num_announced += 1
                self._waiting.append(announcement)
                self._unsent.append(record)
        return announcement

    def flush(self) -> None:
        if not self._unsent:
            return
        with self._changed:
            unsent, self._unsent = self._unsent, []
            if unsent:  # layers announce the same few records again and again
                texts = list(dict.fromkeys(unsent))
                numbers = [texts.index(record) for record in unsent]
                self._send("records", self._num_announced - len(unsent), texts, numbers)

    def ask(self, announcement: Announcement) -> None:
        """Asks the hub to answer now, with the records of those ranks that have come."""
        with self._changed:
            if not announcement.is_answered:
                self._send("late", announcement.index)

    def on_loss(self, callback: Callable[[PeerLostError], None]) -> None:
        """Calls back, in another thread, as soon as a rank is lost; now for those that are."""
        with self._changed:
            self._callbacks.append(callback)
            known = list(self.losses)
        for lost in known:
            callback(lost)

    def survivors(self) -> list[int]:
        """Returns the global ranks that are left, once all of them have asked.

        All get the same answer. Raises PeerLostError if the first rank is lost, and the hub with
        it.
        """
        with self._changed:
            self._survivors = None
            self._send("survivors")
            self._changed.wait_for(lambda: self._survivors is not None or self._has_lost(0))
            if self._survivors is None:
                raise self.losses[-1]
            return self._survivors

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
            open_files.discard(self._connection.fileno())
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)

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
        open_files.discard(self._connection.fileno())
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)
        if self._hub is not None:
            self._hub.wait()
        if self._listener is not current_thread():
            self._listener.join(_CLOSE_S)  # the hub ends the connection in a moment
        self._connection.close()

    def _send(self, *message: object) -> None:
        if self._connection is not None:
            with suppress(OSError):  # the listening thread notices it
                self._connection.sendall(encode(*message))

    def _listen(self) -> None:
        assert self._connection is not None
        with suppress(OSError), self._connection.makefile("rb") as lines:
            while line := lines.readline(LINE_BYTES):
                match json.loads(line):
                    case ["same", last]:
                        self._answer_through(last)
                    case ["records", index, records, why]:
                        self._answer(
                            index, ExchangeError(why, records) if None in records else records
                        )
                    case ["lost", rank, how]:
                        self._lose(rank, how)
                    case ["survivors", ranks]:
                        with self._changed:
                            self._survivors = [self._ranks[rank] for rank in ranks]
                            self._changed.notify_all()
                    case ["failed", rank, sentence]:
                        timer = Timer(_TOGETHER_S, self._lose, (rank, f"it failed: {sentence}"))
                        timer.daemon = True
                        timer.start()
                    case ["bye"]:
                        return
        self._lose(0, LOST)

    def _answer(self, index: int, answer: Records | Exception) -> None:
        with self._changed:
            for announcement in self._waiting:
                if announcement.index == index and not announcement.is_answered:
                    announcement.answer(answer)
            self._changed.notify_all()

    def _answer_through(self, last: int) -> None:
        """Notes that all ranks have announced the same, except where another answer has come."""
        with self._changed:
            while self._waiting and self._waiting[0].index <= last:
                announcement = self._waiting.popleft()
                if not announcement.is_answered:
                    announcement.answer([announcement.record])
            self._changed.notify_all()

    def _lose(self, rank: int, how: str) -> None:
        number = self._ranks[rank]
        error = PeerLostError(f"rank {number} is lost ({how})", number, how)
        with self._changed:
            if self._closing or self._has_lost(rank):
                return
            self.lost = self.lost or error
            self.losses.append(error)
            callbacks = list(self._callbacks)
            while self._waiting:
                announcement = self._waiting.popleft()
                if not announcement.is_answered:
                    announcement.answer(error)
            self._changed.notify_all()
        _log.error("%s: this run cannot go on", error)
        for callback in callbacks:
            callback(error)


def drop_connections() -> None:
    """Drops the connections of this process to the hubs of all its groups."""
    for peers in list(_of_group.values()):
        peers.drop()


def _connect(group: dist.ProcessGroup) -> Peers:
    ranks = dist.get_process_group_ranks(group)
    rank, size = dist.get_rank(group), len(ranks)
    if size == 1:
        return Peers(ranks, None, None)
    # The store of torchrun outlives its ranks: those that it restarts must not find an earlier hub.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.distributed_c10d.PrefixStore(f"distca {attempt}", group.get_group_store())
    store.set(f"node {rank}", socket.gethostname())
    hub = None
    if rank == 0:
        nodes = {store.get(f"node {other}") for other in range(size)}
        listener, address = _listener(local=len(nodes) == 1)
        token = secrets.token_hex(16)
        hub = Hub(size, listener, token)
        store.set("hub", json.dumps([address, listener.getsockname()[1], token]))
    address, port, token = json.loads(store.get("hub"))
    try:
        connection = socket.create_connection((address, port), _CONNECT_S)
    except OSError as error:
        raise PeerLostError(
            f"rank {ranks[0]} does not answer at {address} port {port} ({error}): it has ended, or"
            " this node cannot reach that one",
            ranks[0],
        ) from error
    connection.settimeout(None)
    connection.sendall(encode(token, rank))
    return Peers(ranks, hub, connection)


def _listener(*, local: bool) -> tuple[socket.socket, str]:
    """Returns a socket that listens where the other ranks can reach it, and its address.

    On several nodes that is the interface from which this node reaches the master; if it is the
    master itself, all interfaces, under the name by which the others have reached it already.
    """
    if local:
        return socket.create_server((_LOOPBACK, 0)), _LOOPBACK
    master = os.environ.get("MASTER_ADDR", socket.gethostname())
    family, _, _, _, name = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(name)  # sends nothing
        address = probe.getsockname()[0]
    if address.startswith("127.") or address in ("::1", name[0]):
        return socket.create_server(("", 0), family=family), master
    return socket.create_server((address, 0), family=family), address
