"""One step with everything written down: exchanges, computing, and collectives, in order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from recorded import Collectives, Events
from runtime.bodies import Case, context_of
from torch import Tensor

from distca.attention.backends.base import Attended, Gradients
from distca.attention.backends.sdpa import Sdpa
from distca.attention.core import CoreAttention
from distca.attention.prepared import PreparedPlan
from distca.data.documents import Batch
from distca.dispatch.transports.base import Wait
from distca.dispatch.transports.distributed import DistributedTransport
from distca.model.initialize import initialize
from distca.model.llama import on_meta
from distca.runtime.batches import Step
from distca.runtime.parallelize import Precision, parallelize
from distca.runtime.step import StepRunner


class RecordingTransport(DistributedTransport):
    def __init__(self, group: Any, control: Any, half: int, events: Events) -> None:
        super().__init__(group, control)
        self.half, self.events = half, events

    def start(
        self, send: Tensor, recv: Tensor, send_bytes: Sequence[int], recv_bytes: Sequence[int]
    ) -> Wait:
        self.events.append(("start", self.half))
        wait = super().start(send, recv, send_bytes, recv_bytes)

        def recorded() -> None:
            wait()
            self.events.append(("wait", self.half))

        return recorded


class RecordingBackend(Sdpa):
    def __init__(self, half: int, events: Events) -> None:
        self.half, self.events = half, events

    def _forward(self, *args: Any) -> Attended:
        self.events.append(("compute", self.half))
        return super()._forward(*args)

    def _backward(self, *args: Any) -> Gradients:
        self.events.append(("compute", self.half))
        return super()._backward(*args)


class RecordingAttention(CoreAttention):
    def __init__(self, group: Any, control: Any, half: int, events: Events) -> None:
        super().__init__(transport=RecordingTransport(group, control, half, events))
        self.recording = RecordingBackend(half, events)

    def prepare(self, *args: Any, **plans: Any) -> PreparedPlan:
        return replace(super().prepare(*args, **plans), backend=self.recording)


def recorded_step(
    group: dist.ProcessGroup, case: Case, batch: Batch
) -> tuple[Events, Events, Counter[str]]:
    """Events of forward and of backward; collectives of both."""
    context, events = context_of(case.parallel), []
    attentions = tuple(
        RecordingAttention(context.attention, context.control, half, events) for half in (0, 1)
    )
    runner = StepRunner(
        context,
        attentions,
        recompute=case.recompute,
        observe=lambda number, _: events.append(("tick", number)),
    )
    model = on_meta(case.config)
    parallelize(model, context, Precision())
    initialize(model, seed=0)
    for seam in model.in_order:
        _record_parts(seam, events)
    step = Step.of(case.planner(), batch)
    runner.train(model, step)  # warm-up
    events.clear()
    with Collectives() as collectives:
        runner.train(model, step)
    tick = events.index(("tick", 0))
    return events[:tick], events[tick + 1 : -1], collectives.counts


def counted_step(group: dist.ProcessGroup, case: Case, batch: Batch) -> tuple[int, Counter[str]]:
    """Seams of this rank, and the collectives of a step."""
    context, plans = context_of(case.parallel), case.planner()
    assert context.stage is not None
    model = on_meta(case.config, *plans.stages[context.stage])
    parallelize(model, context, Precision())
    initialize(model, seed=0)
    runner, step = StepRunner.of(context, backend="sdpa"), Step.of(plans, batch)
    runner.train(model, step)
    with Collectives() as collectives:
        runner.train(model, step)
    return len(model.seams), collectives.counts


def _record_parts(seam: Any, events: Events) -> None:
    """A seam's work on a half, both ways: its first module is met once by each, ping first."""
    module = seam.embed or seam.after.norm
    passes = Counter[str]()

    def forward(*_: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            return  # recomputed: its backward follows at once and is written down
        events.append(("compute", passes["forward"] % 2))
        passes["forward"] += 1

    def backward(*_: Any) -> None:
        events.append(("compute", 1 - passes["backward"] % 2))
        passes["backward"] += 1

    module.register_forward_hook(forward)
    module.register_full_backward_hook(backward)
