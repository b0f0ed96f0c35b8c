"""The time of a 1F1B pipeline, in which each group of workers runs independently.

Groups synchronize at the end of the step. Arrays are [stages, micro_batches, groups].
"""

from dataclasses import dataclass

import numpy as np

from distca.pipeline.schedule import BACKWARD, FORWARD, Phase
from distca.planning.spans import Floats


@dataclass(frozen=True, eq=False)
class Timeline:
    """When each micro-batch starts and stops on each stage, forward and backward."""

    start: dict[Phase, Floats]
    stop: dict[Phase, Floats]

    @property
    def end(self) -> Floats:
        """When each stage of each group is done, [stages, groups]."""
        ends: Floats = self.stop[BACKWARD].max(axis=1)
        return ends


def one_f_one_b(forward: Floats, backward: Floats, p2p: Floats) -> Timeline:
    """Returns when each micro-batch runs on each stage.

    forward, backward: seconds of each micro-batch on each stage.
    p2p: [stages - 1, micro_batches, groups] seconds of sending to the next stage, or back.
    """
    stages, micro_batches, groups = forward.shape
    taken: dict[Phase, Floats] = {FORWARD: forward, BACKWARD: backward}
    start, stop = ({phase: np.full(forward.shape, np.nan) for phase in taken} for _ in range(2))
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
                    ready = ready + p2p[border, m]
                begin = np.maximum(free[stage], ready)
                start[phase][stage, m] = begin
                free[stage] = stop[phase][stage, m] = begin + taken[phase][stage, m]
                todo.pop(0)
    return Timeline(start, stop)


def order(stage: int, stages: int, micro_batches: int) -> list[tuple[Phase, int]]:
    """Returns the cells of a stage in order: first as many forwards as stages come after it."""
    ahead = min(stages - 1 - stage, micro_batches)
    cells: list[tuple[Phase, int]] = [(FORWARD, m) for m in range(ahead)]
    for m in range(micro_batches - ahead):
        cells += [(FORWARD, ahead + m), (BACKWARD, m)]
    return [*cells, *((BACKWARD, m) for m in range(micro_batches - ahead, micro_batches))]


def _ready(
    stop: dict[Phase, Floats], phase: Phase, stage: int, micro_batch: int, stages: int
) -> Floats:
    """Returns when the input of a micro-batch is ready; NaN if that is not known yet."""
    if phase == FORWARD:
        if stage == 0:
            return np.zeros(stop[FORWARD].shape[2])
        return np.asarray(stop[FORWARD][stage - 1, micro_batch])
    if stage + 1 < stages:
        return np.asarray(stop[BACKWARD][stage + 1, micro_batch])
    return np.asarray(stop[FORWARD][stage, micro_batch])
