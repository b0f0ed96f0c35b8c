"""One step with its exchanges, computation and collectives recorded in order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from recorded import Collectives, Events, RecordedAttention
from runtime.bodies import Case, context_of
from torch import Tensor

from distca.attention.overlap import AsyncAttention, SlotAttention
from distca.data.documents import Batch
from distca.dispatch.transports.distributed import DistributedTransport
from distca.model.initialize import initialize
from distca.model.llama import Arriving, Leaving, Seam, on_meta
from distca.runtime.batches import Step
from distca.runtime.parallelize import Precision, parallelize
from distca.runtime.step import StepRunner


def recorded_step(
    group: dist.ProcessGroup, case: Case, batch: Batch
) -> tuple[Events, Events, Counter[str]]:
    """Events of the forward and of the backward tick, and the collectives of both."""
    context, events = context_of(case.parallel), []
    attentions = tuple(
        RecordedAttention(DistributedTransport(context.attention_group), half, events)
        for half in (0, 1)
    )
    runner = StepRunner(
        context,
        attentions,
        recompute=case.recompute,
        observe=lambda number, _: events.append(("tick", number)),
    )
    step = Step.of(case.planner(), batch)
    model = None
    if not context.only_serves:
        model = on_meta(case.config)
        parallelize(model, context, Precision())
        initialize(model, seed=0)
        positions = [
            step.rows(half, context.worker).positions for half in step.plan.micro_batches[0]
        ]
        for seam in model.seam_list:
            _record_linear(seam, positions, events)
    runner.train(model, step)  # warm-up
    events.clear()
    with Collectives() as collectives:
        runner.train(model, step)
    tick = events.index(("tick", 0))
    return events[:tick], events[tick + 1 : -1], collectives.counts


def operations(events: Events) -> list[tuple[str, int]]:
    """The operations of a tick program, as (kind, half), from what was recorded.

    The first exchange of a slot and half is its dispatch. The second one starts at the end of its
    compute, and is waited for in its combine.
    """
    found, exchanges = [], Counter[tuple[str, int]]()
    for what, half in events:
        exchanges[what, half] += 1
        first = exchanges[what, half] % 2 == 1
        if what == "linear":
            found.append(("linear", half))
        elif what == "start":
            found.append(("dispatch" if first else "compute", half))
        elif what == "wait" and not first:
            found.append(("combine", half))
    return found


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


def uses_prepared_plans(group: dist.ProcessGroup, case: Case, batch: Batch) -> bool:
    """Whether the layers of a step use the very plans that were prepared, and no copies."""
    context, used = context_of(case.parallel), []
    model = on_meta(case.config)
    parallelize(model, context, Precision())
    initialize(model, seed=0)
    runner, step = StepRunner.of(context, backend="sdpa"), Step.of(case.planner(), batch)
    prepared = runner.prepare(step.plan)
    dispatch = SlotAttention.__call__

    def recorded(attention: SlotAttention, layer: int, *others: Any) -> AsyncAttention:
        used.append(dispatch(attention, layer, *others))
        return used[-1]

    with patch.object(SlotAttention, "__call__", recorded):
        runner.train(model, step, prepared)
    known = {id(plan) for tick in prepared for slot in tick for plan in slot}
    return len(used) == case.config.layers and {id(one.plan) for one in used} <= known


def _record_linear(seam: Seam, positions: Sequence[Tensor], events: Events) -> None:
    """Records when the linear layers of a seam start on a half, forward and backward."""
    assert not torch.equal(*positions), "halves are told apart by their positions"
    linear = seam.linear

    def recorded(arriving: Arriving, attended: Tensor | None) -> Leaving:
        leaving = linear(arriving, attended)
        if torch._C._current_graph_task_id() == -1:  # else it is recomputed in a backward pass
            half = int(torch.equal(arriving.positions, positions[1]))
            events.append(("linear", half))
            end = leaving.x if leaving.qkv is None else leaving.qkv.q
            end.register_hook(lambda _: events.append(("linear", half)))
        return leaving

    seam.linear = recorded
