"""The hub of a group: a thread of its first rank, to which every rank keeps one connection.

It compares what ranks announce, and it notices when one of them is lost: the operating system
closes the connections of a process that dies, and keepalive probes reveal a node that is gone.
A rank that stays silent although it is pinged is lost too, if the first rank has asked for that.

A candidate is a process that is no rank yet. It waits until the ranks make their groups again.

Messages are lists in JSON, a line each. The first one is ``[token, rank]``, or ``[token,
"candidate", wish]`` with the number that a candidate would like to have.
From a rank: ``["records", texts, numbers]`` announces the texts of these numbers, ``["late",
index, seconds]`` asks who has not yet after so long, ``["regroup", admits]`` asks who is left, and
admits candidates, ``["cancel", name]`` gives up to make the groups of this name, ``["missing",
rank]`` says that one will never come, ``["watch", ranks, seconds]`` lets silent ones be lost,
``["pong"]`` answers a ping, ``["failed", sentence]`` and ``["bye"]`` precede an end.
To a rank: ``["same", index]`` if all records up to this one are equal, except those that have been
answered, ``["records", index, records, why]`` if they differ or if some (None) have not come,
``["lost", rank, how]`` and ``["failed", rank, sentence]`` about another rank, ``["candidates",
number]`` how many wait, ``["ping"]``, and ``["bye"]`` before the hub ends.
To a candidate: ``["candidate", number]``; candidates have the numbers after those of the ranks.
To ranks and candidates: ``["members", ranks, candidates, name]`` once all ranks that are left have
asked, and ``["cancelled", name, who]`` if a rank has given up, or an admitted candidate has ended.

[Note: all or none] An announcement that needs a lost rank fails on every rank, and one that the
rank had made before succeeds on every rank: one thread writes all answers, and each rank reads the
answer before the news of the loss, or the news and no answer. So ranks need nothing else to agree
on whether a step counts.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
from collections.abc import Sequence
from contextlib import suppress
from threading import Event, Thread
from typing import Any

from distca.dispatch.comparison import Comparison

LINE_BYTES = 1 << 20
LOST = "its process ended without a word"
_DRAIN_S = 1.0
_PINGS = 6  # without an answer, after which a rank counts as lost

open_files: set[int] = set()  # of all connections: a forked child must not keep them open


def keep_alive(connection: socket.socket) -> None:
    """Sends small messages at once; lets the connection fail about 5 s after its peer's node.

    Probes are sent while nothing else is. What was sent is repeated for minutes without a limit.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    probes = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 3}  # seconds, and a number
    for name, value in (probes | {"TCP_USER_TIMEOUT": 5000}).items():  # milliseconds
        if hasattr(socket, name):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    open_files.add(connection.fileno())


def encode(*message: Any) -> bytes:
    return json.dumps(message).encode() + b"\n"


class Hub:
    def __init__(self, num_ranks: int, listener: socket.socket, token: str) -> None:
        self._num_ranks, self._listener, self._token = num_ranks, listener, token
        self._writers: dict[int, asyncio.StreamWriter] = {}  # of the ranks that are there
        self._gone: set[int] = set()  # ranks that were there
        self._announced = Comparison(num_ranks)
        self._asking: dict[int, bool] = {}  # whether a rank that asks who is left admits candidates
        self._wishes: dict[int, int | None] = {}  # of the candidates that wait, by their numbers
        self._admitted: dict[int, str] = {}  # candidates by number, and the groups that they make
        self._num_candidates = 0
        self._heard: dict[int, float] = {}  # when each rank has sent its last message
        self._silent: dict[int, str] = {}  # ranks that do not answer, in words
        self._watching: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._first_left, self._ended = asyncio.Event(), Event()
        self._is_over = False
        Thread(target=self._run, name="distca hub", daemon=True).start()

    def wait(self) -> None:
        """Waits for the end of the hub, which follows that of the first rank's connection."""
        self._ended.wait(2 * _DRAIN_S)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()
            self._ended.set()

    async def _serve(self) -> None:
        open_files.add(listening := self._listener.fileno())
        server = await asyncio.start_server(self._attend, sock=self._listener, limit=LINE_BYTES)
        await self._first_left.wait()
        self._is_over = True
        self._wishes.clear()  # so that candidates know it too
        self._broadcast("bye")
        with suppress(asyncio.TimeoutError, OSError):
            drained = (writer.drain() for writer in self._writers.values())
            await asyncio.wait_for(asyncio.gather(*drained), _DRAIN_S)
        open_files.discard(listening)  # another file may get this number
        server.close()
        attending = asyncio.all_tasks() - {asyncio.current_task()}
        for task in attending:
            task.cancel()
        await asyncio.gather(*attending, return_exceptions=True)  # they close their connections

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves one connection until it ends."""
        keep_alive(connection := writer.get_extra_info("socket"))
        file, rank, last_message = connection.fileno(), None, ("lost", LOST)
        try:
            rank = self._welcome(json.loads(await reader.readline()), writer)
            while rank is not None and (line := await reader.readline()):
                self._heard[rank] = self._loop.time()
                match json.loads(line):
                    case ["failed", sentence]:
                        last_message = ("failed", sentence)
                    case ["bye"]:
                        last_message = ("bye", "")
                    case message if rank < self._num_ranks:
                        self._handle(rank, message)
        except (ValueError, OSError, asyncio.CancelledError):
            pass  # a foreign client, a connection that was reset, or the end of the hub
        finally:
            open_files.discard(file)
            writer.close()
            if rank is not None and not self._is_over:
                kind, how = last_message
                self._leave(rank, kind, self._silent.get(rank, how))

    def _welcome(self, hello: Any, writer: asyncio.StreamWriter) -> int | None:
        """Returns the number of a rank or of a candidate; None for anything else."""
        match hello:
            case [self._token, int(rank)] if rank in range(self._num_ranks):
                if rank in self._writers or rank in self._gone:
                    return None
                self._writers[rank] = writer
                return rank
            case [self._token, "candidate", int() | None as wish]:
                number = self._num_ranks + self._num_candidates
                self._num_candidates += 1
                self._writers[number], self._wishes[number] = writer, wish
                self._send(number, "candidate", number)
                self._tell_candidates()
                return number
        return None

    def _handle(self, rank: int, message: Any) -> None:
        match message:
            case ["records", texts, numbers]:
                self._announced.add(rank, [texts[number] for number in numbers])
                self._settle()
            case ["late", index, seconds]:
                why = f"no word for {seconds:g} s, look at what it does or set a longer timeout"
                self._answer(index, self._announced.at(index), why)
            case ["regroup", admits]:
                self._asking[rank] = admits
                self._answer_members()
            case ["cancel", name]:
                self._broadcast("cancelled", name, rank)
            case ["missing", other] if other not in self._writers.keys() | self._gone:
                self._leave(other, "lost", LOST)
            case ["watch", ranks, seconds]:
                task = self._loop.create_task(self._watch(set(ranks), seconds))
                self._watching.add(task)  # a task lives as long as someone refers to it

    async def _watch(self, ranks: set[int], seconds: float) -> None:
        """Ends the connections of ranks that do not answer for so many seconds.

        Unanswered pings are counted, since time also passes while this process is stopped.
        """
        unanswered = dict.fromkeys(ranks, 0)
        while True:
            pinged_at = self._loop.time()
            pinged = ranks & self._writers.keys()
            for rank in pinged:
                self._send(rank, "ping")
            await asyncio.sleep(seconds / _PINGS)
            for rank in pinged & self._writers.keys():
                silent = self._heard.get(rank, 0.0) < pinged_at
                unanswered[rank] = unanswered[rank] + 1 if silent else 0
                if unanswered[rank] == _PINGS:
                    self._silent[rank] = f"it has not answered for {seconds:g} s"
                    self._writers[rank].transport.abort()

    def _leave(self, rank: int, kind: str, how: str) -> None:
        self._writers.pop(rank, None)
        if rank >= self._num_ranks:
            self._wishes.pop(rank, None)
            if name := self._admitted.pop(rank, ""):
                self._broadcast("cancelled", name, rank)
            self._tell_candidates()
            return
        self._gone.add(rank)
        if rank == 0:
            self._first_left.set()
        if kind != "bye":
            self._broadcast(kind, rank, how)
        self._settle()
        self._answer_members()

    def _tell_candidates(self) -> None:
        self._send(0, "candidates", len(self._wishes))

    def _answer_members(self) -> None:
        """Tells who is left and who is new, once all ranks that are left have asked."""
        left = self._asking.keys() - self._gone
        if left and len(left | self._gone) == self._num_ranks:
            name, new = secrets.token_hex(8), {}
            if all(self._asking.values()):
                new, self._wishes = self._wishes, {}
            self._admitted |= dict.fromkeys(new, name)
            self._asking.clear()
            self._broadcast("members", sorted(left), list(new.items()), name)

    def _settle(self) -> None:
        """Answers where all ranks have announced, or where some of them cannot any more."""
        before = self._announced.num_compared
        for index, different in self._announced.compare().items():
            self._answer(index, different, "")
        if self._announced.num_compared > before:
            self._broadcast("same", self._announced.num_compared - 1)
        for index in self._announced.incomplete if self._gone else ():
            records = self._announced.at(index)
            if absent := sorted(rank for rank in self._gone if records[rank] is None):
                ended = ", ".join(map(str, absent))
                self._answer(index, records, f"rank{'s' * (len(absent) > 1)} {ended} ended before")

    def _answer(self, index: int, records: Sequence[str | None], why: str) -> None:
        """Tells the ranks that have announced a record what the others have announced."""
        for rank, record in enumerate(records):
            if record is not None:
                self._send(rank, "records", index, records, why)

    def _broadcast(self, *message: Any) -> None:
        """Sends a message to all ranks and to the candidates that are admitted."""
        for rank in self._writers.keys() - self._wishes.keys():
            self._send(rank, *message)

    def _send(self, rank: int, *message: Any) -> None:
        if rank in self._writers:
            self._writers[rank].write(encode(*message))


def _close_in_child() -> None:
    for file in open_files:
        with suppress(OSError):
            os.close(file)


os.register_at_fork(after_in_child=_close_in_child)
