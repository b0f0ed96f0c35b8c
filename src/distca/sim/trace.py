"""Simulated steps as timelines, for ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from distca.sim.scenario import Way
from distca.sim.streams import Event

MOST_LANES = 64  # of a step; a viewer shows no more at once
STREAMS = ("compute", "port")
US = 1e6

Steps = Mapping[Way, tuple[Event, ...]]  # events of simulated ways: ``simulate(..., record=True)``


def trace(steps: Steps) -> dict[str, Any]:
    """Every lane is a process, with a thread for what it computes and one for what it sends.

    A lane is the GPUs of one tensor-parallel group, which do the same at the same time.
    """
    events = []
    for number, (way, recorded) in enumerate(steps.items()):
        first = number * MOST_LANES
        events += list(_names(way, first))
        for event in recorded:
            events += list(_shown(event, first))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _names(way: Way, first: int) -> Iterator[dict[str, Any]]:
    p = way.parallel
    for lane in range(min(p.num_plan_ranks, MOST_LANES)):
        stage = lane // p.workers_per_stage
        role = "serves" if stage >= p.pp else f"stage {stage}" if p.pp > 1 else ""
        label = {"name": f"{way.name}: lane {lane}" + (f", {role}" if role else "")}
        process = {"ph": "M", "pid": first + lane}
        yield process | {"name": "process_name", "args": label}
        yield process | {"name": "process_sort_index", "args": {"sort_index": first + lane}}
        for thread, stream in enumerate(STREAMS):
            yield process | {"name": "thread_name", "tid": thread, "args": {"name": stream}}


def _shown(event: Event, first: int) -> Iterator[dict[str, Any]]:
    """Of the lanes on which something happened."""
    start, stop = event.start[:MOST_LANES], event.stop[:MOST_LANES]
    thread = STREAMS.index(event.stream)
    for lane in np.flatnonzero(stop > start).tolist():
        yield {
            "ph": "X",
            "name": event.what,
            "pid": first + lane,
            "tid": thread,
            "ts": float(start[lane]) * US,
            "dur": float(stop[lane] - start[lane]) * US,
        }
