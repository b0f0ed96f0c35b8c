"""Batches are drawn and planned in the background, for the next step, while this one runs."""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from distca.data.loader import Loader
from distca.pipeline.step_planner import StepPlanner
from distca.runtime.batches import Step


@dataclass(frozen=True, eq=False)
class Prepared:
    """A batch with its plans, and where the loader stands after it."""

    step: Step
    loader_state: dict[str, Any]
    planning_s: float  # in the background
    waited_s: float  # of it, what the step had to wait for


class Ahead:
    """``next()`` gives the batch that was prepared meanwhile and starts on another.

    depth: how many are prepared in advance. All happens in one thread, in order, so the loader is
    never asked by two at once.
    """

    def __init__(self, loader: Loader, planner: StepPlanner, depth: int = 2) -> None:
        self._loader, self._planner = loader, planner
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="distca-plan")
        self._waiting: deque[Future[Prepared]] = deque(
            self._thread.submit(self._prepare) for _ in range(depth)
        )

    def next(self) -> Prepared:
        start = time.perf_counter()
        prepared = self._waiting.popleft().result()
        waited = time.perf_counter() - start
        self._waiting.append(self._thread.submit(self._prepare))
        return Prepared(prepared.step, prepared.loader_state, prepared.planning_s, waited)

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _prepare(self) -> Prepared:
        batch = self._loader.next_batch()
        state = self._loader.state()
        start = time.perf_counter()
        step = Step.of(self._planner, batch)
        return Prepared(step, state, time.perf_counter() - start, 0.0)
