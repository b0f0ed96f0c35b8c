"""What a worker trains: its share of the model, the optimizer, and the checkpoints of both."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from distca.model.checkpoints import load
from distca.model.config import ModelConfig
from distca.model.initialize import initialize
from distca.model.llama import Llama, on_meta
from distca.pipeline.stages import Layers
from distca.runtime.mesh import RankContext
from distca.runtime.parallelize import Precision, parallelize
from distca.train.checkpoints import Checkpoints
from distca.train.config import Config, TrainSection
from distca.train.optimizer import adamw, clip, freeze, is_finite, learning_rate


@dataclass(frozen=True, eq=False)
class Weights:
    """The weights of this worker, in the course of training.

    stages: the ranks at the same position in all pipeline stages.
    """

    model: Llama
    optimizer: torch.optim.Optimizer
    checkpoints: Checkpoints
    train: TrainSection
    stages: dist.ProcessGroup

    @classmethod
    def build(
        cls, config: Config, model: ModelConfig, layers: Layers, context: RankContext, folder: Path
    ) -> Weights:
        """Builds the layers of this worker, loaded from ``model.path`` or initialized by the seed.

        folder: that of the run.
        """
        train, device = config.train, context.device
        built = on_meta(model, *layers)
        precision = Precision.named(config.parallel.precision, device)
        parallelize(built, context, precision, compile=config.parallel.compile)
        if config.model.path:
            load(built, Path(config.model.path), device=device)
        else:
            initialize(built, train.seed, device=device)
        freeze(built, train.frozen)
        optimizer = adamw(built, train)
        where = folder / "checkpoints"
        checkpoints = Checkpoints(where, built, optimizer, context, keep=train.keep)
        return cls(built, optimizer, checkpoints, train, context.pipeline_group)

    @property
    def are_finite(self) -> bool:
        return is_finite(self.model)

    def clip(self) -> float:
        """Scales gradients down to ``train.clip``; returns the norm of all of them before."""
        return clip(self.model, self.train.clip, self.stages)

    def update(self, step: int) -> None:
        """Takes a step with the gradients, and drops them."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, self.train)
        self.optimizer.step()
        self.drop_gradients()

    def drop_gradients(self) -> None:
        self.optimizer.zero_grad()
