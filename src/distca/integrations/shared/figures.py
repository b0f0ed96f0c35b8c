"""What shared attention changes and costs in another library's trainer, for the trainer's logs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import Lock
from time import perf_counter

from distca.planning.plan import Plan

PREFIX = "distca/"


class AttentionFigures:
    """Figures of the batches since the last ``take``; threads that plan add to them too."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._sums, self._num_plans = defaultdict[str, float](float), 0

    def add(self, plan: Plan) -> None:
        """Counts the plan of the layers of one kind in one batch."""
        with self._lock:
            self._num_plans += 1
            self._sums["imbalance_before"] += plan.imbalance_before
            self._sums["imbalance"] += plan.imbalance
            self._sums["gb_per_layer"] += (plan.traffic.total + plan.backward_traffic.total) / 1e9

    @contextmanager
    def timing(self, name: str) -> Iterator[None]:
        """Adds the seconds of the ``with`` block to a name."""
        began = perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self._sums[name] += perf_counter() - began

    def take(self, attention_s: Mapping[str, float]) -> dict[str, float]:
        """Returns figures since the last call; those of plans only if there were any.

        attention_s: seconds of this rank's attention by ``PlannedAttention.take_seconds``.

        Of plans, the mean: ``imbalance_before`` and ``imbalance`` are the attention of the busiest
        rank over the mean, without and with distca, and ``gb_per_layer`` is what all ranks send in
        a layer's forward and backward. Of this rank, the sum of seconds: ``attention_s``,
        ``exposed_s`` of waiting for other ranks, ``planning_s`` in the background, and
        ``plan_wait_s`` of waiting for that.
        """
        with self._lock:
            sums, count = self._sums, self._num_plans
            self._sums, self._num_plans = defaultdict(float), 0
        figures = {f"{name}_s": attention_s.get(name, 0.0) for name in ("attention", "exposed")}
        figures |= {name: sums.pop(name, 0.0) for name in ("planning_s", "plan_wait_s")}
        figures |= {name: total / count for name, total in sums.items()}
        return {f"{PREFIX}{name}": value for name, value in figures.items()}


def sentence_of(figures: Mapping[str, float]) -> str:
    """Returns the figures of ``AttentionFigures.take`` in one line, for a log of text."""
    found = {name.removeprefix(PREFIX): value for name, value in figures.items()}
    shared = ""
    if "imbalance" in found:
        shared = (
            f"imbalance {found['imbalance_before']:.2f}x without and {found['imbalance']:.2f}x with"
            f" it, {found['gb_per_layer']:.3g} GB sent per layer, "
        )
    return (
        f"distca: {shared}{found['attention_s']:.3g} s of attention,"
        f" {found['exposed_s']:.3g} s of waiting for ranks, {found['plan_wait_s']:.3g} s for plans"
    )
