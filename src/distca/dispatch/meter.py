"""How long attention computes and how long it waits for peers, on the device that does it.

On a GPU nothing waits for the measuring: events are recorded and read when somebody asks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

PENDING = 512  # events that are kept at most, roughly: nobody may ever ask


class Meter:
    """Sums of spans by name, since they were last taken."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def span(self, name: str, device: torch.device) -> Iterator[None]:
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
        """Seconds by name; waits for the device, and starts anew."""
        if self._events:
            self._events[-1][2].synchronize()
        self._fold()
        taken, self._seconds = self._seconds, {}
        return taken

    def _fold(self) -> None:
        """Adds up what is over already, without waiting for the rest."""
        pending = []
        for name, start, stop in self._events:
            if stop.query():  # type: ignore[no-untyped-call]
                self._add(name, float(start.elapsed_time(stop)) / 1e3)
            else:
                pending.append((name, start, stop))
        self._events = pending

    def _add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds
