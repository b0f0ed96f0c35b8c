"""Measures how long a rank computes attention and how long it waits for peers, on the device.

On a GPU, measuring does not synchronise: events are recorded, and read when ``take`` is called.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

PENDING = 512  # about how many events are kept at most, since ``take`` may never be called


class Meter:
    """Seconds by name, summed since the last ``take``."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def time(self, name: str, device: torch.device) -> Iterator[None]:
        """Measures the work of the ``with`` block and adds it to a name."""
        if device.type == "cuda":
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            yield
            stop.record()
            self._events.append((name, start, stop))
            if len(self._events) > PENDING:
                self._fold()
        else:
            begin = time.perf_counter()
            yield
            self._add(name, time.perf_counter() - begin)

    def take(self) -> dict[str, float]:
        """Returns the seconds by name and resets them; synchronises with the device."""
        if self._events:
            self._events[-1][2].synchronize()
        self._fold()
        taken, self._seconds = self._seconds, {}
        return taken

    def _fold(self) -> None:
        """Adds up what has ended, without waiting for the rest."""
        pending = []
        for name, start, stop in self._events:
            if stop.query():  # type: ignore[no-untyped-call]
                self._add(name, float(start.elapsed_time(stop)) / 1e3)
            else:
                pending.append((name, start, stop))
        self._events = pending

    def _add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds
