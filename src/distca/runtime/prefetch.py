"""Loads and plans the batches of the next steps in the background while a step runs."""

import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from distca.data.loader import Loader
from distca.pipeline.step_planner import StepPlanner
from distca.runtime.batches import Step


@dataclass(frozen=True, eq=False)
class Prefetched:
    """A batch with its plans."""

    step: Step
    loader_state: dict[str, Any]  # the state of the loader after this batch, for checkpoints
    plan_s: float  # in the background
    waited_s: float = 0.0  # for which the training loop waited for this batch


class Prefetcher:
    """Loads and plans up to ``depth`` batches ahead, in order, in one background thread."""

    def __init__(self, loader: Loader, planner: StepPlanner, depth: int = 2) -> None:
        self._loader, self._planner = loader, planner
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="distca-plan")
        self._queue: deque[Future[Prefetched]] = deque(
            self._thread.submit(self._load_and_plan) for _ in range(depth)
        )

    def next(self) -> Prefetched:
        """Returns the next batch, and starts to load another one."""
        start = time.perf_counter()
        batch = self._queue.popleft().result()
        waited_s = time.perf_counter() - start
        self._queue.append(self._thread.submit(self._load_and_plan))
        return replace(batch, waited_s=waited_s)

    def close(self) -> None:
        """Ends the background thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _load_and_plan(self) -> Prefetched:
        batch = self._loader.next_batch()
        state = self._loader.state()
        start = time.perf_counter()
        step = Step.of(self._planner, batch)
        return Prefetched(step, state, time.perf_counter() - start)
