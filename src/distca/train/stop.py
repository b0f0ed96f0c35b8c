"""A request to stop, by SIGTERM: the run ends after its step and saves."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


class StopRequest:
    """Set by a signal, and read after each step. A second signal changes nothing."""

    def __init__(self) -> None:
        self.requested = False

    def request(self) -> None:
        self.requested = True

    @contextmanager
    def on_sigterm(self) -> Iterator[None]:
        """Requests a stop on SIGTERM inside the ``with`` block."""
        try:
            before = signal.signal(signal.SIGTERM, lambda *_: self.request())
        except ValueError:  # not the main thread, so signals are handled elsewhere
            yield
            return
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)
