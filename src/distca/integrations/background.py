"""Work that is done in the background, in order, and promised meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

Result = TypeVar("Result")


class InOrder:
    """One thread in the background that does what it is given, in order.

    A daemon: where a rank fails, its end must not wait for peers that wait for it.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread: Thread | None = None

    def submit(self, work: Callable[[], Result]) -> Future[Result]:
        if self._thread is None:
            self._thread = Thread(target=self._run, name="distca-plan", daemon=True)
            self._thread.start()
        promise: Future[Result] = Future()
        self._queue.put((promise, work))
        return promise

    def close(self) -> None:
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
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
