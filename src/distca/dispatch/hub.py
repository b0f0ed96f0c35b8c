"""The hub of a group: a thread of its first rank, to which every rank keeps one connection.

It compares what ranks announce, and it notices when one of them is lost: the operating system
closes the connections of a process that dies, and keepalive probes reveal a node that is gone.
Messages are lists in JSON, a line each.

From a rank: ``["records", index, texts, numbers]`` announces the texts of these numbers,
``["late", index]`` asks who has not yet, ``["survivors"]`` asks who is left, ``["missing", rank]``
says that one will never come, ``["failed", sentence]`` and ``["bye"]`` precede an end.
To a rank: ``["same", index]`` if all records up to this one are equal, except those that have been
answered; ``["records", index, records, why]`` if they differ or if some (None) have not come;
``["lost", rank, how]`` and ``["failed", rank, sentence]`` about another rank; ``["survivors",
ranks]`` once all who are left have asked; and ``["bye"]`` before the hub ends.

[Note: all or none] An announcement that needs a lost rank fails on every rank, and one that the
rank had made before succeeds on every rank: one thread writes all answers, and each rank reads the
answer before the news of the loss, or the news and no answer. So ranks need nothing else to agree
on whether a step counts.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Iterable
from contextlib import suppress
from threading import Event, Thread
from typing import Any

LINE_BYTES = 1 << 20
LOST = "its process ended without a word"
_DRAIN_S = 1.0

open_files: set[int] = set()  # of all connections: a forked child must not keep them open


def keep_alive(connection: socket.socket) -> None:
    """Sends small messages at once; lets the connection fail about 5 s after its peer's node."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 2), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 3)):
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
        self._records: dict[int, dict[int, str]] = {}  # by index and rank
        self._asking: set[int] = set()  # ranks that have asked who is left
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
        self._broadcast("bye")
        with suppress(asyncio.TimeoutError, OSError):
            drained = (writer.drain() for writer in self._writers.values())
            await asyncio.wait_for(asyncio.gather(*drained), _DRAIN_S)
        open_files.discard(listening)  # another file may get this number
        server.close()
        attending = asyncio.all_tasks() - {asyncio.current_task()}
        for task in attending:
            task.cancel()
        await asyncio.gather(*attending)  # they close their connections

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves one connection until it ends."""
        keep_alive(connection := writer.get_extra_info("socket"))
        file, rank, last_message = connection.fileno(), None, ("lost", LOST)
        try:
            token, rank = json.loads(await reader.readline())
            known = rank in self._writers or rank in self._gone
            if token != self._token or known or rank not in range(self._num_ranks):
                rank = None
                return
            self._writers[rank] = writer
            while line := await reader.readline():
                match json.loads(line):
                    case ["records", first, texts, numbers]:
                        for index, number in enumerate(numbers, first):
                            self._records.setdefault(index, {})[rank] = texts[number]
                        self._settle(range(first, first + len(numbers)))
                    case ["late", index]:
                        self._answer(index, "")
                    case ["survivors"]:
                        self._asking.add(rank)
                        self._answer_survivors()
                    case ["missing", other] if other not in self._writers.keys() | self._gone:
                        self._leave(other, "lost", LOST)
                    case ["failed", sentence]:
                        last_message = ("failed", sentence)
                    case ["bye"]:
                        last_message = ("bye", "")
        except (ValueError, OSError, asyncio.CancelledError):
            pass  # a foreign client, a connection that was reset, or the end of the hub
        finally:
            open_files.discard(file)
            writer.close()
            if rank is not None and not self._is_over:
                self._leave(rank, *last_message)

    def _leave(self, rank: int, kind: str, how: str) -> None:
        self._writers.pop(rank, None)
        self._gone.add(rank)
        if rank == 0:
            self._first_left.set()
        if kind != "bye":
            self._broadcast(kind, rank, how)
        self._settle(list(self._records))
        self._answer_survivors()

    def _answer_survivors(self) -> None:
        """Tells who is left, once all of them have asked."""
        left = self._asking - self._gone
        if left and len(left | self._gone) == self._num_ranks:
            self._asking.clear()
            self._broadcast("survivors", sorted(left))

    def _settle(self, indices: Iterable[int]) -> None:
        """Answers where all ranks have announced, or where some of them cannot any more."""
        last_same = None
        for index in indices:
            records = self._records[index]
            if len(records) == self._num_ranks:
                if len(set(records.values())) > 1:
                    self._answer(index, "")
                else:
                    last_same = index
                del self._records[index]
            elif absent := sorted(self._gone - records.keys()):
                ended = ", ".join(map(str, absent))
                self._answer(index, f"rank{'s' * (len(absent) > 1)} {ended} ended before")
        if last_same is not None:
            self._broadcast("same", last_same)

    def _answer(self, index: int, why: str) -> None:
        records = self._records.get(index, {})
        everyone = [records.get(rank) for rank in range(self._num_ranks)]
        for rank in records:
            self._send(rank, "records", index, everyone, why)

    def _broadcast(self, *message: Any) -> None:
        for rank in self._writers:
            self._send(rank, *message)

    def _send(self, rank: int, *message: Any) -> None:
        if rank in self._writers:
            self._writers[rank].write(encode(*message))


def _close_in_child() -> None:
    for file in open_files:
        with suppress(OSError):
            os.close(file)


os.register_at_fork(after_in_child=_close_in_child)
