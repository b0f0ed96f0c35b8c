"""AdamW with warm-up and cosine decay, gradient clipping, and frozen parameters."""

import fnmatch
import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from distca.model.llama import Llama, on_meta
from distca.train.config import TrainSection


def freeze(model: Llama, patterns: Sequence[str]) -> None:
    """Freezes parameters whose name matches a pattern such as ``seams.0.*``.

    Raises ValueError for a pattern that matches no parameter of the whole model.
    """
    names = [name for name, _ in on_meta(model.config).named_parameters()]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise ValueError(
                f"train.frozen: {pattern!r} matches no parameter; names look like {names[0]}"
            )
    frozen = {name for pattern in patterns for name in fnmatch.filter(names, pattern)}
    if len(frozen) == len(names):
        raise ValueError(f"train.frozen = {list(patterns)} freezes every parameter: remove some")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(model.whole_name(name) not in frozen)


def adamw(model: nn.Module, config: TrainSection) -> torch.optim.AdamW:
    """Returns the optimizer; weight decay applies to matrices, not to norms."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    # A stage in which everything is frozen has one group without parameters.
    groups = [group for group in groups if group["params"]] or groups[:1]
    fused = bool(trained) and trained[0].is_cuda  # on GPUs it needs no temporary copies
    return torch.optim.AdamW(
        groups, lr=config.lr, betas=config.betas, fused=fused, foreach=not fused
    )


def learning_rate(step: int, config: TrainSection) -> float:
    """Returns a linear warm-up over ``warmup`` steps, then a cosine decay to ``min_lr``."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    progress = (step - config.warmup) / max(config.steps - config.warmup, 1)
    falling = 0.5 * (1.0 + math.cos(math.pi * min(progress, 1.0)))
    return config.min_lr + (config.lr - config.min_lr) * falling


def clip(model: Llama, most: float, stages: dist.ProcessGroup) -> float:
    """Scales all gradients so that their norm is at most ``most``; returns the norm before.

    most: 0 does not scale.
    stages: the ranks at the same position in all pipeline stages.
    """
    trained = {name: p for name, p in model.named_parameters() if p.grad is not None}
    # The last stage's copy of a tied embedding counts in the first stage.
    once = [p.grad for name, p in trained.items() if model.whole_name(name) == name]
    norm: Tensor = nn.utils.get_total_norm([grad for grad in once if grad is not None])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if dist.get_world_size(stages) > 1:
        squared = norm.to(next(model.parameters()).device) ** 2
        dist.all_reduce(squared, group=stages)
        norm = squared.sqrt()
    if most > 0:
        nn.utils.clip_grads_with_norm_(trained.values(), most, norm)
    return float(norm)


def is_finite(model: nn.Module) -> bool:
    """Returns whether all weights of this rank are finite."""
    mine = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    largest = nn.utils.get_total_norm([p.detach() for p in mine if p.numel()], math.inf)
    return math.isfinite(float(largest))
