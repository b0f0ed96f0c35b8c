"""The usual pipeline in time: every group of workers by itself, one forward, one backward.

Groups meet when the step ends. Arrays are [stages, micro_batches, groups].
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distca.pipeline.schedule import BACKWARD, FORWARD, Phase
from distca.planning.spans import Floats


@dataclass(frozen=True, eq=False)
class Timeline:
    """When each micro-batch begins and ends on each stage, both ways."""

    start: dict[Phase, Floats]
    stop: dict[Phase, Floats]

    @property
    def end(self) -> Floats:
        """[stages, groups]"""
        ends: Floats = self.stop[BACKWARD].max(axis=1)
        return ends


def one_f_one_b(forward: Floats, backward: Floats, passing: Floats) -> Timeline:
    """``passing``: [stages - 1, micro_batches, groups] seconds to the next stage, or back."""
    stages, micro_batches, groups = forward.shape
    taken = {FORWARD: forward, BACKWARD: backward}
    start: dict[Phase, Floats] = {}
    stop: dict[Phase, Floats] = {}
    for phase in (FORWARD, BACKWARD):
        start[phase] = np.full(forward.shape, np.nan)
        stop[phase] = np.full(forward.shape, np.nan)
    free = np.zeros((stages, groups))
    waiting = {stage: list(order(stage, stages, micro_batches)) for stage in range(stages)}
    while any(waiting.values()):
        for stage, todo in waiting.items():
            while todo:
                phase, m = todo[0]
                ready = _ready(stop, phase, stage, m, stages)
                if np.isnan(ready).any():
                    break
                border = stage - 1 if phase == FORWARD else stage
                if 0 <= border < stages - 1:
                    ready = ready + passing[border, m]
                begin = np.maximum(free[stage], ready)
                start[phase][stage, m] = begin
                free[stage] = stop[phase][stage, m] = begin + taken[phase][stage, m]
                todo.pop(0)
    return Timeline(start, stop)


def order(stage: int, stages: int, micro_batches: int) -> list[tuple[Phase, int]]:
    """What a stage does, one after the other: as many forwards ahead as stages lie behind it."""
    ahead = min(stages - 1 - stage, micro_batches)
    cells: list[tuple[Phase, int]] = [(FORWARD, m) for m in range(ahead)]
    for m in range(micro_batches - ahead):
        cells += [(FORWARD, ahead + m), (BACKWARD, m)]
    return [*cells, *((BACKWARD, m) for m in range(micro_batches - ahead, micro_batches))]


def in_flight(stage: int, stages: int, micro_batches: int) -> int:
    return min(stages - stage, micro_batches)


def _ready(
    stop: dict[Phase, Floats], phase: Phase, stage: int, micro_batch: int, stages: int
) -> Floats:
    """When its input is there; NaN if that is not known yet."""
    if phase == FORWARD:
        if stage == 0:
            return np.zeros(stop[FORWARD].shape[2])
        return np.asarray(stop[FORWARD][stage - 1, micro_batch])
    if stage + 1 < stages:
        return np.asarray(stop[BACKWARD][stage + 1, micro_batch])
    return np.asarray(stop[FORWARD][stage, micro_batch])
