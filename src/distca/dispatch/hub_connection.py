"""The connection of a rank, or of a candidate, to the hub: lists in JSON, a line each."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from distca.dispatch.hub import LINE_BYTES, encode, keep_alive, open_files


class HubConnection:
    """A connection that fails silently where it is written: who reads it notices the end."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        keep_alive(connected)

    def send(self, *message: object) -> None:
        with suppress(OSError):
            self._socket.sendall(encode(*message))

    def messages(self) -> Iterator[Any]:
        """Yields what the hub sends, until the connection ends."""
        with suppress(OSError), self._socket.makefile("rb") as lines:
            while line := lines.readline(LINE_BYTES):
                yield json.loads(line)

    def end_sending(self) -> None:
        """Tells the hub that nothing follows; it ends the connection in a moment."""
        self._shut_down(socket.SHUT_WR)

    def drop(self) -> None:
        """Ends the connection at once, as a broken network does."""
        self._shut_down(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def _shut_down(self, how: int) -> None:
        open_files.discard(self._socket.fileno())
        with suppress(OSError):
            self._socket.shutdown(how)
