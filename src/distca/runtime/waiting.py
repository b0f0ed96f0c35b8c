"""Work that waits in C++, where Python would handle no signal."""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

Result = TypeVar("Result")


def open_to_signals(work: Callable[[], Result], limit_s: float | None = None) -> Result:
    """Returns the result of work that waits in C++, where Python would handle no signal.

    Raises TimeoutError if it takes longer than the limit; it then goes on, and is not waited for.
    """
    done: Future[Result] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    Thread(target=run, daemon=True).start()
    return done.result(limit_s)
