"""Work that is done in the background, in order, and promised meanwhile."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

Result = TypeVar("Result")
_PATIENCE_S = 5.0  # at the end of the process


class InOrder:
    """One thread in the background that does what it is given, in order.

    A daemon: where a rank fails, its end must not wait long for peers that wait for it. But it must
    wait a little: a thread that is inside a collective when Python ends aborts the process.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread: Thread | None = None

    def submit(self, work: Callable[[], Result]) -> Future[Result]:
        if self._thread is None:
            self._thread = Thread(target=self._run, name="distca-plan", daemon=True)
            self._thread.start()
            atexit.register(self.close, _PATIENCE_S)
        promise: Future[Result] = Future()
        self._queue.put((promise, work))
        return promise

    def close(self, patience_s: float | None = None) -> None:
        """Ends the thread, after what it was given, if that does not take longer than this."""
        if self._thread is not None:
            atexit.unregister(self.close)
            self._queue.put(None)
            self._thread.join(patience_s)
            self._thread = None

    def _run(self) -> None:
        while (given := self._queue.get()) is not None:
            _keep(*given)


def at_once(work: Callable[[], Result]) -> Future[Result]:
    promise: Future[Result] = Future()
    _keep(promise, work)
    return promise


def _keep(promise: Future[Result], work: Callable[[], Result]) -> None:
    try:
        promise.set_result(work())
    except BaseException as error:
        promise.set_exception(error)
