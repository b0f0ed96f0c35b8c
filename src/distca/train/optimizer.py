"""AdamW with warm-up and cosine decay, clipping, and parameters that do not learn."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from distca.train.config import TrainSection


def freeze(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Switches learning off for parameters whose name fits a pattern (``seams.0.*``); their names.

    A pattern that fits nothing is a mistake, and said to be one.
    """
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise ValueError(
                f"train.frozen: {pattern!r} fits no parameter; names look like {names[0]}"
            )
    frozen = {name for pattern in patterns for name in fnmatch.filter(names, pattern)}
    if len(frozen) == len(names):
        raise ValueError(f"train.frozen = {list(patterns)} freezes every parameter: leave some out")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    return sorted(frozen)


def adamw(model: nn.Module, config: TrainSection) -> torch.optim.AdamW:
    """Matrices decay, norms do not."""
    learning = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in learning if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in learning if p.ndim <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    fused = all(p.is_cuda for p in learning)  # there it needs no temporary copies
    return torch.optim.AdamW(
        groups, lr=config.lr, betas=config.betas, fused=fused, foreach=not fused
    )


def learning_rate(step: int, config: TrainSection) -> float:
    """Of step 0, 1, ...: rises for ``warmup`` steps, then falls as a cosine to ``min_lr``."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    progress = (step - config.warmup) / max(config.steps - config.warmup, 1)
    falling = 0.5 * (1.0 + math.cos(math.pi * min(progress, 1.0)))
    return config.min_lr + (config.lr - config.min_lr) * falling


def clip(parameters: Iterable[nn.Parameter], most: float) -> float:
    """The norm of all gradients over all ranks, which are scaled so that it is at most ``most``.

    0 only measures.
    """
    learning = [p for p in parameters if p.grad is not None]
    norm: Tensor = nn.utils.get_total_norm([p.grad for p in learning if p.grad is not None])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if most > 0:
        nn.utils.clip_grads_with_norm_(learning, most, norm)
    return float(norm)
