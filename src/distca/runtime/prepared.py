"""The plans of a step on this rank, prepared before the step starts."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from distca.attention.core import CoreAttention
from distca.attention.prepared import PreparedPlan
from distca.dispatch.tensors import TensorSpec
from distca.pipeline.schedule import BACKWARD, FORWARD, Phase
from distca.pipeline.step_plan import StepPlan
from distca.planning.plan import Plan

PreparedSlot = tuple[PreparedPlan, ...]  # one for each half
PreparedTicks = tuple[tuple[PreparedSlot, ...], ...]  # the slots of each tick


def prepare_ticks(
    step: StepPlan,
    attentions: Sequence[CoreAttention],
    stage: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> PreparedTicks:
    """Prepares the plans of a step by tick, attention slot and half; equal plans only once.

    attentions: one for each half.
    stage: the pipeline stage of this rank; None on a dedicated server.
    dtype, device: those of q, k and v.
    """
    known: dict[tuple[Phase, int, Plan], PreparedPlan] = {}

    def prepare(phase: Phase, half: int, plan: Plan) -> PreparedPlan:
        key = (phase, half, plan)
        if key not in known:
            s = plan.shape
            spec = TensorSpec(s.heads, s.kv_heads, s.head_dim, dtype, device)
            direction = "forward" if phase == FORWARD else "backward"
            known[key] = attentions[half].prepare(spec, **{direction: plan})
        return known[key]

    ticks = [
        [tuple(prepare(tick.phase, half, plan) for half, plan in enumerate(slot)) for slot in slots]
        for tick, slots in zip(step.schedule.ticks, step.slots, strict=True)
    ]
    if stage is not None and step.schedule.has_backward:
        _add_backward(ticks, step, stage)
    return tuple(map(tuple, ticks))


def _add_backward(ticks: list[list[PreparedSlot]], step: StepPlan, stage: int) -> None:
    """Adds the backward direction to the forward slots of a stage's own layers.

    Autograd runs the backward of a layer with the PreparedPlan of its forward, but the plan of the
    backward is that of a later tick. Forward slot n is backward slot ``layers - 1 - n``.
    """
    start, stop = step.stages[stage]
    backward_slots = {
        tick.micro_batches[stage]: slots
        for tick, slots in zip(step.schedule.ticks, ticks, strict=True)
        if tick.phase == BACKWARD
    }
    for tick, slots in zip(step.schedule.ticks, ticks, strict=True):
        micro_batch = tick.micro_batches[stage]
        if tick.phase == BACKWARD or micro_batch is None:
            continue
        for number in range(step.backward_slots[stage]):
            forward = stop - start - 1 - number
            pairs = zip(slots[forward], backward_slots[micro_batch][number], strict=True)
            slots[forward] = tuple(replace(f, backward=b.backward) for f, b in pairs)
