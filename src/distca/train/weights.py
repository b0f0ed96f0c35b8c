"""What a worker trains: its share of the model, the optimizer, and the checkpoints of both."""

from pathlib import Path
from typing import NamedTuple

import torch

from distca.model.checkpoints import load
from distca.model.config import ModelConfig
from distca.model.initialize import initialize
from distca.model.llama import Llama, on_meta
from distca.pipeline.stages import Layers
from distca.runtime.mesh import RankContext
from distca.runtime.parallelize import Precision, parallelize
from distca.train.checkpoints import Checkpoints
from distca.train.config import Config
from distca.train.optimizer import adamw, freeze


class Weights(NamedTuple):
    model: Llama
    optimizer: torch.optim.Optimizer
    checkpoints: Checkpoints


def build(
    config: Config, model: ModelConfig, layers: Layers, context: RankContext, folder: Path
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
    checkpoints = Checkpoints(folder / "checkpoints", built, optimizer, context, keep=train.keep)
    return Weights(built, optimizer, checkpoints)
