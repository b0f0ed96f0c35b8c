"""Timelines of simulated steps for ui.perfetto.dev or chrome://tracing."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from distca.sim.scenario import Strategy
from distca.sim.streams import Event

MAX_RANKS = 64  # of a step; a viewer cannot show more at once
STREAMS = ("tick", "compute", "port")
US = 1e6

Steps = Mapping[Strategy, tuple[Event, ...]]  # recorded by ``simulate(..., record=True)``


def trace(steps: Steps) -> dict[str, Any]:
    """Returns a trace with a process for each plan rank and a thread for each of its streams.

    In steps of several micro-batches, another thread shows which one a rank runs in each tick.
    A plan rank stands for the GPUs of one tensor-parallel group, which do the same thing at the
    same time.
    """
    events = []
    for number, (strategy, recorded) in enumerate(steps.items()):
        first = number * MAX_RANKS
        used = {event.stream for event in recorded}
        events += list(_names(strategy, first, [s for s in STREAMS if s in used]))
        for event in recorded:
            events += list(_shown(event, first))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _names(strategy: Strategy, first: int, streams: Sequence[str]) -> Iterator[dict[str, Any]]:
    p = strategy.parallel
    for rank in range(min(p.num_plan_ranks, MAX_RANKS)):
        stage = rank // p.workers_per_stage
        role = "serves" if stage >= p.pp else f"stage {stage}" if p.pp > 1 else ""
        label = {"name": f"{strategy.name}: rank {rank}" + (f", {role}" if role else "")}
        process = {"ph": "M", "pid": first + rank}
        yield process | {"name": "process_name", "args": label}
        yield process | {"name": "process_sort_index", "args": {"sort_index": first + rank}}
        for stream in streams:
            thread = {"tid": STREAMS.index(stream), "args": {"name": stream}}
            yield process | {"name": "thread_name"} | thread


def _shown(event: Event, first: int) -> Iterator[dict[str, Any]]:
    """Yields the event on each rank on which it took time."""
    start, stop = event.start[:MAX_RANKS], event.stop[:MAX_RANKS]
    thread = STREAMS.index(event.stream)
    for rank in np.flatnonzero(stop > start).tolist():
        yield {
            "ph": "X",
            "name": event.what,
            "pid": first + rank,
            "tid": thread,
            "ts": float(start[rank]) * US,
            "dur": float(stop[rank] - start[rank]) * US,
        }
