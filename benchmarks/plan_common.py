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
IF_ABOVE = 12  # runs of a plan that is above the aim: other processes only make it slower
Row = dict[str, Any]
Made = TypeVar("Made")


def fastest(make: Callable[[], Made], aim_s: float = np.inf) -> tuple[Made, float]:
    """Returns what is made, and the least seconds of one core that it takes."""
    seconds = np.inf
    for number in range(IF_ABOVE):
        if number >= BEST_OF and seconds <= aim_s:
            break
        began = time.process_time()  # since others may use the machine
        made = make()
        seconds = min(seconds, time.process_time() - began)
    return made, float(seconds)


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
