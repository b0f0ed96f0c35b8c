"""Loss of held-out documents, overall and by their length."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch

from distca.data.documents import IGNORE, Batch
from distca.model.llama import Llama
from distca.pipeline.step_planner import StepPlanner
from distca.planning.spans import Floats
from distca.runtime.batches import Step
from distca.runtime.step import StepRunner

EDGES = (256, 1024, 4096, 16384, 65536)  # borders of the classes of document lengths, in tokens
NAMES = (f"below_{EDGES[0]}", *(f"from_{edge}" for edge in EDGES))


@dataclass(frozen=True, eq=False)
class LengthLosses:
    """The sum of losses and the number of targets in each class of document lengths (``NAMES``)."""

    sums: Floats
    counts: Floats


def evaluate(
    model: Llama | None,
    runner: StepRunner,
    planner: StepPlanner,
    batches: Iterable[Batch],
    stopped: Callable[[], bool],
) -> dict[str, float]:
    """Returns the mean loss per target; the arguments are those of ``losses_by_length``.

    Nothing is returned if it was stopped, or if there is no target.
    """
    found = losses_by_length(model, runner, planner, batches, stopped)
    return {} if found is None else _means(found)


@torch.no_grad()
def losses_by_length(
    model: Llama | None,
    runner: StepRunner,
    planner: StepPlanner,
    batches: Iterable[Batch],
    stopped: Callable[[], bool],
) -> LengthLosses | None:
    """Returns the losses of all ranks; all ranks call it, and servers have no model.

    stopped: asked before each batch, with the same answer on all ranks; then nothing is returned.
    """
    sums, counts = np.zeros(len(NAMES)), np.zeros(len(NAMES))
    for batch in batches:
        if stopped():
            return None
        step = Step.of(planner.for_evaluation(), batch, train=False)
        for number, losses in runner.losses(model, step).items():
            for half, loss in zip(step.plan.micro_batches[number], losses, strict=True):
                rows = step.rows(half, runner.context.worker)
                targets = runner.tp_share(rows.labels) != IGNORE
                lengths = runner.tp_share(rows.lengths)[targets]
                bucket = torch.bucketize(lengths, torch.tensor(EDGES), right=True).numpy()
                np.add.at(sums, bucket, loss.each.cpu()[targets].double().numpy())
                np.add.at(counts, bucket, 1)
    mine = torch.from_numpy(np.stack([sums, counts]))
    return LengthLosses(*runner.context.host.gather(mine).sum(0).numpy())


def _means(found: LengthLosses) -> dict[str, float]:
    if not found.counts.any():  # the batches end before the first target
        return {}
    result = {"eval_loss": float(found.sums.sum() / found.counts.sum())}
    for name, total, count in zip(NAMES, found.sums, found.counts, strict=True):
        if count:
            result[f"eval_loss_{name}"] = float(total / count)
    return result
