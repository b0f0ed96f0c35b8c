"""A timeline of one step over all ranks, for Perfetto or chrome://tracing."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from distca.runtime.disk import writing


@contextmanager
def tracing(folder: Path, rank: int, all_ranks: Callable[[], Sequence[int]]) -> Iterator[None]:
    """Profiles the context on every rank; rank 0 merges all into ``trace.json``.

    all_ranks: waits for all ranks, and returns which they are.
    """
    folder.mkdir(parents=True, exist_ok=True)
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        yield
    profiler.export_chrome_trace(str(folder / f"rank-{rank}.json"))
    ranks = all_ranks()
    if rank == 0:
        merge([folder / f"rank-{number}.json" for number in ranks], folder / "trace.json")


def merge(paths: list[Path], out: Path) -> None:
    """Merges the traces of all ranks, with one process for each rank.

    Each file has its own time base. The clocks of one host agree, so the bases align the files.
    """
    traces = [json.loads(path.read_text()) for path in paths]
    bases = [int(trace.get("baseTimeNanoseconds", 0)) for trace in traces]
    events = []
    for rank, (trace, base) in enumerate(zip(traces, bases, strict=True)):
        shift_us = (base - bases[0]) / 1e3
        names: dict[object, str] = {}
        for event in trace["traceEvents"]:
            number = names.setdefault(event.get("pid"), f"{rank}.{len(names)}")
            moved = {**event, "pid": number}
            if "ts" in event:
                moved["ts"] = event["ts"] + shift_us
            if event.get("name") != "process_name":
                events.append(moved)
        for number in names.values():
            label = {"name": f"rank {rank}"}
            events.append({"ph": "M", "name": "process_name", "pid": number, "args": label})
    with writing(out):
        out.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
