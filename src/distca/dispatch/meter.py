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
        self._events: list[tuple[str, float, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def time(self, name: str, device: torch.device, planned_s: float = 0.0) -> Iterator[None]:
        """Measures the work of the ``with`` block and adds it to a name.

        planned_s: how long it was planned to take, which is added to "planned" at the same moment.
        """
        if device.type == "cuda":
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            yield
            stop.record()
            self._events.append((name, planned_s, start, stop))
            if len(self._events) > PENDING:
                self._fold()
        else:
            begin = time.perf_counter()
            yield
            self._add(name, time.perf_counter() - begin, planned_s)

    def take(self, *, wait: bool = True) -> dict[str, float]:
        """Returns the seconds by name and resets them.

        It synchronises with the device, or (``wait=False``) leaves what has not ended to the next
        call.
        """
        if self._events and wait:
            self._events[-1][-1].synchronize()
        self._fold()
        taken, self._seconds = self._seconds, {}
        return taken

    def _fold(self) -> None:
        """Adds up what has ended, without waiting for the rest."""
        pending = []
        for name, planned_s, start, stop in self._events:
            if stop.query():  # type: ignore[no-untyped-call]
                self._add(name, float(start.elapsed_time(stop)) / 1e3, planned_s)
            else:
                pending.append((name, planned_s, start, stop))
        self._events = pending

    def _add(self, name: str, seconds: float, planned_s: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds
        if planned_s:
            self._seconds["planned"] = self._seconds.get("planned", 0.0) + planned_s
