"""The plans of a step on this rank, prepared before the step starts."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch

from distca.attention.core import CoreAttention
from distca.attention.prepared import PreparedPlan
from distca.dispatch.tensors import TensorSpec
from distca.pipeline.schedule import BACKWARD, FORWARD, Phase, Tick
from distca.pipeline.step_plan import Slot, StepPlan
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

    @cache
    def prepare(phase: Phase, half: int, plan: Plan) -> PreparedPlan:
        s = plan.shape
        spec = TensorSpec(s.heads, s.kv_heads, s.head_dim, s.value_dim, dtype, device)
        if phase == FORWARD:
            return attentions[half].prepare(spec, forward=plan, announce=False)
        return attentions[half].prepare(spec, backward=plan, announce=False)

    own_backward = {} if stage is None else _own_backward(step, stage)

    def prepare_slot(tick: Tick, number: int, slot: Slot) -> PreparedSlot:
        prepared = [prepare(tick.phase, half, plan) for half, plan in enumerate(slot)]
        micro_batch = None if stage is None else tick.micro_batches[stage]
        if tick.phase == FORWARD and (micro_batch, number) in own_backward:
            for half, plan in enumerate(own_backward[micro_batch, number]):
                backward = prepare(BACKWARD, half, plan).backward
                prepared[half] = replace(prepared[half], backward=backward)
        return tuple(prepared)

    return tuple(
        tuple(prepare_slot(tick, number, slot) for number, slot in enumerate(slots))
        for tick, slots in zip(step.schedule.ticks, step.slots, strict=True)
    )


def _own_backward(step: StepPlan, stage: int) -> dict[tuple[int | None, int], Slot]:
    """Returns the backward plans of a stage's own layers, by micro-batch and forward slot.

    Autograd runs the backward of a layer with the PreparedPlan of its forward, so both directions
    must be in it. A layer has different slots in them: forward, a stage fills the slots of a tick
    with its layers from the first to the last, and backward from the last to the first trained
    one.
    """
    start, stop = step.stages[stage]
    forward_slots = range(stop - start)
    plans: dict[tuple[int | None, int], Slot] = {}
    for tick, slots in zip(step.schedule.ticks, step.slots, strict=True):
        micro_batch = tick.micro_batches[stage]
        if tick.phase == BACKWARD and micro_batch is not None:
            own = slots[: step.backward_slots[stage]]
            for forward_slot, slot in zip(reversed(forward_slots), own, strict=False):
                plans[micro_batch, forward_slot] = slot
    return plans
