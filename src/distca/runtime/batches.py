"""A step as a rank runs it: a batch of documents and the plans for it, made in the background."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from distca.data.documents import IGNORE, Batch
from distca.data.loader import Loader
from distca.dispatch.background import DaemonExecutor, on_this_stream
from distca.pipeline.step_plan import Half, StepPlan
from distca.pipeline.step_planner import StepPlanner
from distca.planning.spans import expand
from distca.runtime.prepared import PreparedTicks

Prepare = Callable[[StepPlan], PreparedTicks]


class TokenRows(NamedTuple):
    """The packed tokens of one worker and half, [T] each."""

    tokens: Tensor
    positions: Tensor  # of each token in its document
    labels: Tensor
    lengths: Tensor  # of each token's document, with its prefix


@dataclass(frozen=True, eq=False)
class Step:
    """The batch and the plans of one optimizer step."""

    batch: Batch
    plan: StepPlan

    @classmethod
    def of(cls, planner: StepPlanner, batch: Batch, *, train: bool = True) -> Step:
        """Plans a batch, forward and backward or (``train=False``) forward only."""
        plan = planner.plan(batch.lengths, prefixes=batch.prefixes, train=train)
        return cls(batch, plan)

    def rows(self, half: Half, worker: int) -> TokenRows:
        """Packs the tokens of one worker of a stage; filler documents are zeros without labels."""
        placement, members = half.placement, half.members.tolist()
        shard = np.flatnonzero(placement.worker == worker)
        number, start, stop = (
            column[shard] for column in (placement.document, placement.start, placement.stop)
        )
        size = stop - start
        positions, lengths = expand(start, size), np.repeat(placement.lengths[number], size)
        tokens, labels = np.zeros_like(positions), np.full_like(positions, IGNORE)
        # There may be thousands of shards, and the device waits for the first rows of a step.
        columns = (column.tolist() for column in (number, start, stop, np.cumsum(size)))
        for one, low, high, end in zip(*columns, strict=True):
            if one < len(members):
                document, here = self.batch.documents[members[one]], slice(end - high + low, end)
                own = slice(low - document.prefix, high - document.prefix)
                tokens[here], labels[here] = document.tokens[own], document.labels[own]
        return TokenRows(*map(torch.from_numpy, (tokens, positions, labels, lengths)))


@dataclass(frozen=True, eq=False)
class Prefetched:
    step: Step
    loader_state: dict[str, Any]  # the state of the loader after this batch, for checkpoints
    plan_s: float  # how long planning took, in the background
    prepared: PreparedTicks | None = None  # None if this rank cannot run the step
    waited_s: float = 0.0  # how long the training loop waited for this batch


class Prefetcher:
    """Loads, plans and prepares up to ``depth`` batches ahead, in order, in a background thread.

    It begins with a batch at the next ``start``, or when it is needed. [Note: deferred work]

    prepare: makes this rank's layouts of a plan, such as ``StepRunner.prepare``.
    current: the batch that ``next`` has returned last.
    """

    def __init__(
        self, loader: Loader, planner: StepPlanner, prepare: Prepare, depth: int = 2
    ) -> None:
        self._loader, self._prepare = loader, prepare
        self.current: Prefetched | None = None
        self._thread = DaemonExecutor("distca-plan")
        self._queue = deque(self._submit(planner) for _ in range(depth))

    def next(self, planner: StepPlanner) -> Prefetched:
        """Returns the next batch, and submits another one, which ``planner`` plans.

        So the planner of a step is chosen at the same point of the loop on every rank, ``depth``
        steps before it, however far the background thread is.
        """
        start, planned = time.perf_counter(), self._queue.popleft()
        self._thread.start(planned)
        batch = planned.result()
        waited_s = time.perf_counter() - start
        self._queue.append(self._submit(planner))
        self.current = replace(batch, waited_s=waited_s)
        return self.current

    def start(self) -> None:
        """Begins with the batches ahead, when the caller has launched a step."""
        self._thread.start(self._queue[-1])

    def plan_again(self, planner: StepPlanner, prepare: Prepare, *, repeats: bool = True) -> None:
        """Plans batches that are loaded for other ranks, with the same documents.

        repeats: whether the current batch is needed again.
        """
        self._prepare = prepare
        if self.current is not None and repeats:
            self.current = _plan_again(self.current, planner, prepare)
        self._queue = deque(self._submit_again(before, planner) for before in self._queue)

    def close(self) -> None:
        self._thread.shutdown()

    def _submit(self, planner: StepPlanner) -> Future[Prefetched]:
        prepare = self._prepare

        def load_and_plan() -> Prefetched:
            while not (batch := self._loader.next_batch()).num_targets:
                pass  # prompts only, of which nothing can be learned
            return _plan(batch, self._loader.state(), planner, prepare)

        return self._thread.submit(on_this_stream(load_and_plan), deferred=True)

    def _submit_again(self, before: Future[Prefetched], planner: StepPlanner) -> Future[Prefetched]:
        prepare = self._prepare
        # There is one thread, so the result of ``before`` is there when its turn comes.
        again = on_this_stream(lambda: _plan_again(before.result(), planner, prepare))
        return self._thread.submit(again, deferred=True)


def _plan_again(before: Prefetched, planner: StepPlanner, prepare: Prepare) -> Prefetched:
    planned = _plan(before.step.batch, before.loader_state, planner, prepare)
    return replace(planned, waited_s=before.waited_s)


def _plan(
    batch: Batch, loader_state: dict[str, Any], planner: StepPlanner, prepare: Prepare
) -> Prefetched:
    start = time.perf_counter()
    step, prepared = Step.of(planner, batch), None
    with suppress(ValueError):  # the step tries again, and tells all ranks why it cannot
        prepared = prepare(step.plan)
    return Prefetched(step, loader_state, time.perf_counter() - start, prepared)
