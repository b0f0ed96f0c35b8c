"""Loss of held-out documents, overall and by their length."""

from collections.abc import Callable, Iterable

import numpy as np
import torch

from distca.data.documents import IGNORE, Batch
from distca.model.llama import Llama
from distca.pipeline.step_planner import StepPlanner
from distca.planning.spans import Floats
from distca.runtime.batches import Step
from distca.runtime.step import StepRunner

EDGES = (256, 1024, 4096, 16384, 65536)  # borders of the classes of document lengths, in tokens
NAMES = (f"below {EDGES[0]}", *(f"from {edge}" for edge in EDGES))


@torch.no_grad()
def evaluate(
    model: Llama | None,
    runner: StepRunner,
    planner: StepPlanner,
    batches: Iterable[Batch],
    stopped: Callable[[], bool],
) -> dict[str, float]:
    """Returns the mean loss per target; all ranks call it, and servers have no model.

    stopped: asked before each batch, with the same answer on all ranks; then nothing is returned.
    """
    sums, counts = np.zeros(len(NAMES)), np.zeros(len(NAMES))
    for batch in batches:
        if stopped():
            return {}
        step = Step.of(planner.for_evaluation(), batch, train=False)
        for number, losses in runner.losses(model, step).items():
            for half, loss in zip(step.plan.micro_batches[number], losses, strict=True):
                rows = step.rows(half, runner.context.worker)
                targets = runner.tp_share(rows.labels) != IGNORE
                lengths = runner.tp_share(rows.lengths)[targets]
                bucket = torch.bucketize(lengths, torch.tensor(EDGES), right=True).numpy()
                np.add.at(sums, bucket, loss.each.cpu()[targets].double().numpy())
                np.add.at(counts, bucket, 1)
    return _means(sums, counts, runner)


def _means(sums: Floats, counts: Floats, runner: StepRunner) -> dict[str, float]:
    mine = torch.from_numpy(np.stack([sums, counts]))
    sums, counts = runner.context.host.gather(mine).sum(0).numpy()
    result = {"eval_loss": float(sums.sum() / max(counts.sum(), 1))}
    for name, total, count in zip(NAMES, sums, counts, strict=True):
        if count:
            result[f"eval_loss {name}"] = float(total / count)
    return result
