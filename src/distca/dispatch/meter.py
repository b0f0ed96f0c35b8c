"""Measures how long a rank computes attention and how long it waits for peers, on the device.

On a GPU, measuring does not synchronise: events are recorded, and read when ``take`` is called.
"""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

PENDING = 512  # about how many events are kept at most, since ``take`` may never be called


Seconds = defaultdict[str, float]  # by name


class Meter:
    """Seconds by name, summed since the last ``take``; a lap, such as a tick, has its own sums."""

    def __init__(self) -> None:
        self._laps: list[Seconds] = [defaultdict(float)]
        self._events: list[tuple[Seconds, str, float, torch.cuda.Event, torch.cuda.Event]] = []

    def start_lap(self) -> None:
        """Begins another lap, to which everything belongs that begins from now on."""
        self._laps.append(defaultdict(float))

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
            self._events.append((self._laps[-1], name, planned_s, start, stop))
            if len(self._events) > PENDING:
                self._fold()
        else:
            lap, begin = self._laps[-1], time.perf_counter()
            yield
            _add(lap, name, time.perf_counter() - begin, planned_s)

    def take(self, *, wait: bool = True) -> dict[str, float]:
        """Returns the seconds by name and resets them.

        It synchronises with the device, or (``wait=False``) leaves what has not ended to the next
        call.
        """
        total: Seconds = defaultdict(float)
        for lap in self.take_laps(wait=wait):
            for name, seconds in lap.items():
                total[name] += seconds
        return dict(total)

    def take_laps(self, *, wait: bool = True) -> list[Seconds]:
        """Returns the seconds of each lap, as ``take`` does; the first is before ``start_lap``."""
        if self._events and wait:
            self._events[-1][-1].synchronize()
        self._fold()
        taken, self._laps = self._laps, [defaultdict(float)]
        self._events = [(self._laps[0], *event[1:]) for event in self._events]
        return taken

    def _fold(self) -> None:
        """Adds up what has ended, without waiting for the rest."""
        pending = []
        for event in self._events:
            lap, name, planned_s, start, stop = event
            if stop.query():  # type: ignore[no-untyped-call]
                _add(lap, name, float(start.elapsed_time(stop)) / 1e3, planned_s)
            else:
                pending.append(event)
        self._events = pending


def _add(lap: Seconds, name: str, seconds: float, planned_s: float) -> None:
    lap[name] += seconds
    if planned_s:
        lap["planned"] += planned_s
