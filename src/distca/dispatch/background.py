"""Work in a background thread, returned as futures."""

import atexit
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")
_EXIT_TIMEOUT_S = 5.0


class DaemonExecutor:
    """Runs functions one after another in one daemon thread.

    ``ThreadPoolExecutor(1)`` does not fit: at exit Python joins its thread without a time limit, so
    a rank that fails while its thread is inside a collective would wait for peers that wait for it.
    This executor waits for at most a few seconds at exit. It cannot do without waiting: a daemon
    thread that is inside a collective when the interpreter ends aborts the process.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread: Thread | None = None

    def submit(self, work: Callable[[], Result]) -> Future[Result]:
        if self._thread is None:
            self._thread = Thread(target=self._run, name="distca", daemon=True)
            self._thread.start()
            atexit.register(self.shutdown, _EXIT_TIMEOUT_S)
        future: Future[Result] = Future()
        self._queue.put((future, work))
        return future

    def shutdown(self, timeout_s: float | None = None) -> None:
        """Ends the thread after all submitted work, and waits for that up to ``timeout_s``."""
        if self._thread is not None:
            atexit.unregister(self.shutdown)
            self._queue.put(None)
            self._thread.join(timeout_s)
            self._thread = None

    def _run(self) -> None:
        while (submitted := self._queue.get()) is not None:
            _complete(*submitted)
            del submitted  # so that a thread without work keeps no tensors alive


def on_this_stream(work: Callable[[], Result]) -> Callable[[], Result]:
    """Returns the work for another thread, to run on the CUDA stream of this thread.

    What it copies to the device is then there before this thread's next launch uses it, and its
    memory is not used for anything else before that is done.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return work
    stream = torch.cuda.current_stream()

    def run() -> Result:
        with torch.cuda.stream(stream):
            return work()

    return run


def run_now(work: Callable[[], Result]) -> Future[Result]:
    """Runs ``work`` in this thread and returns it as a completed future."""
    future: Future[Result] = Future()
    _complete(future, work)
    return future


def _complete(future: Future[Result], work: Callable[[], Result]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)
