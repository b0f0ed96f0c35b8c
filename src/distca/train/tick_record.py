"""The ticks of a step: what each rank was to do in them, and what it has measured."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from distca.dispatch.meter import Meter
from distca.pipeline.schedule import FORWARD
from distca.pipeline.step_plan import StepPlan
from distca.planning.costs.base import PS
from distca.planning.spans import Floats
from distca.train.metrics import Record

MEASURED = ("tick", "attention", "planned", "exposed")  # names of the meters


def measured_ticks(meters: Sequence[Meter], num_ticks: int) -> Tensor:
    """[ticks, MEASURED] Returns what this rank has measured in each tick of the last step.

    Laps before these belong to an evaluation, or to a try of the step that was given up.
    """
    table = torch.zeros(num_ticks, len(MEASURED), dtype=torch.float64)
    for meter in meters:
        for tick, lap in enumerate(meter.take_laps()[-num_ticks:]):
            table[tick] += torch.tensor([lap[name] for name in MEASURED], dtype=torch.float64)
    return table


def tick_record(plan: StepPlan, plan_rank: Tensor, measured: Tensor) -> Record:
    """Returns the ticks of a step as plain values, [ticks][plan ranks] each.

    plan_rank: [ranks] the number of each rank in the plans. Of ranks with the same one, as tensor
        parallelism has them, the slowest counts.
    measured: [ranks, ticks, MEASURED]
    """
    planned = planned_seconds(plan)
    worst = np.zeros((planned.shape[1], *measured.shape[1:]))
    np.maximum.at(worst, plan_rank.to(torch.int64).numpy(), measured.numpy())
    num_stages = plan.schedule.num_stages
    return {
        "cells": [[t.cell(stage) for stage in range(num_stages)] for t in plan.schedule.ticks],
        "phases": [tick.phase for tick in plan.schedule.ticks],
        "workers_per_stage": plan.micro_batches[0][0].placement.num_workers,
        "planned_s": _rounded(planned),
        **{
            f"{name}_s": _rounded(worst[:, :, MEASURED.index(name)].T)
            for name in ("tick", "attention", "exposed")
        },
    }


def planned_seconds(plan: StepPlan) -> Floats:
    """[ticks, plan ranks] Returns the seconds of attention that are planned for each rank."""
    seconds = np.zeros((len(plan.slots), len(plan.speed)))
    for number, (tick, slots) in enumerate(zip(plan.schedule.ticks, plan.slots, strict=True)):
        for one in (half for slot in slots for half in slot):
            load = one.forward_load_ps if tick.phase == FORWARD else one.backward_load_ps
            speed = one.devices.speed
            seconds[number] += load / np.where(speed > 0, speed, 1.0) / PS
    return seconds


def _rounded(seconds: Floats) -> list[list[float]]:
    return np.round(seconds, 6).tolist()  # type: ignore[no-any-return]
