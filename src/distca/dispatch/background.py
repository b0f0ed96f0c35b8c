"""Work in a background thread, returned as futures.

[Note: deferred work] Python runs one thread at a time. Work of some milliseconds in the background,
such as planning, delays the launches of the main thread by as long, and by more where the two take
turns. At the beginning of a step nothing is launched yet, so that the device waits as well. So work
may be deferred until ``start``, which is called when the main thread has launched a forward pass:
then the device is busy, and the main thread soon waits for it.
"""

import atexit
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")
_Submitted = tuple[Future[Any], Callable[[], Any]]
_EXIT_TIMEOUT_S = 5.0


class DaemonExecutor:
    """Runs functions one after another in one daemon thread.

    ``ThreadPoolExecutor(1)`` does not fit: at exit Python joins its thread without a time limit, so
    a rank that fails while its thread is inside a collective would wait for peers that wait for it.
    This executor waits for at most a few seconds at exit. It cannot do without waiting: a daemon
    thread that is inside a collective when the interpreter ends aborts the process.
    """

    def __init__(self, name: str = "distca") -> None:
        self._name = name  # of the thread
        self._queue: SimpleQueue[_Submitted | None] = SimpleQueue()
        self._deferred: deque[_Submitted] = deque()
        self._lock = Lock()
        self._thread: Thread | None = None

    def submit(self, work: Callable[[], Result], *, deferred: bool = False) -> Future[Result]:
        """Runs work after all that was started before it.

        deferred: whether it waits for ``start``. Other ranks must not wait for such work.
        """
        future: Future[Result] = Future()
        with self._lock:
            if deferred:
                self._deferred.append((future, work))
            else:
                self._put([(future, work)])
        return future

    def start(self, last: Future[Any] | None = None) -> None:
        """Starts the next deferred work, or all up to ``last`` if that is still deferred."""
        with self._lock:
            count = min(len(self._deferred), 1)
            if last is not None:
                futures = [future for future, _ in self._deferred]
                count = futures.index(last) + 1 if last in futures else 0
            self._put([self._deferred.popleft() for _ in range(count)])

    def _put(self, submitted: Sequence[_Submitted]) -> None:
        for one in submitted:
            self._queue.put(one)
        if submitted and self._thread is None:
            self._thread = Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
            atexit.register(self.shutdown, _EXIT_TIMEOUT_S)

    def shutdown(self, timeout_s: float | None = None) -> None:
        """Ends the thread after all started work, and waits for that up to ``timeout_s``."""
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
