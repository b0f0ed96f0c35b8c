"""Kernels that are loaded before a step instead of in the middle of it, where ranks share a GPU.

CUDA loads a kernel when it is first used, and waits for the GPU to do so. cuBLAS has many kernels
for a matrix product, and chooses one by the number of tokens, which differs from batch to batch
where documents are placed by their cost. On a GPU of its own, a rank waits for itself. On a shared
one it waits for the kernels of all ranks, among them collectives that wait for this rank: a
deadlock. So every number of tokens is tried once, at a point where no rank waits for another.
"""

from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from distca.model.config import ModelConfig
from distca.model.initialize import initialize
from distca.model.llama import Arriving, Llama, on_meta, plainly
from distca.pipeline.step_plan import StepPlan
from distca.runtime.mesh import RankContext


def warm_up_step(
    model: Llama, plan: StepPlan, context: RankContext, dtype: torch.dtype, *, recompute: bool
) -> None:
    """Loads the kernels of this rank's linear layers for the numbers of tokens in a step."""
    tp = context.parallel.tp
    for halves in plan.micro_batches:
        for half in halves:
            tokens = int(half.placement.tokens[context.worker])
            # Tensor parallelism splits the tokens of norms and of the loss.
            for count in {tokens, tokens // tp}:
                _warm_up(model.config, tp, count, dtype, context.device, recompute)
    torch.cuda.synchronize()


@cache  # a number of tokens is warmed up once
@torch.enable_grad()
def _warm_up(
    config: ModelConfig,
    tp: int,
    tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    recompute: bool,
) -> None:
    """Trains a layer without attention and the loss on some tokens, on this rank alone."""
    config = replace(
        config,
        layers=1,
        heads=config.heads // tp,
        kv_heads=config.kv_heads // tp,
        ffn=config.ffn // tp,
        window=None,
        window_pattern=0,
    )
    layer = on_meta(config)
    initialize(layer, seed=0, device=device)
    layer.to(dtype)
    zeros = torch.zeros(tokens, dtype=torch.int64, device=device)
    arriving = Arriving(zeros, zeros, labels=zeros)
    (leaving,) = layer([arriving], plainly(_no_attention), recompute=recompute)
    assert leaving.loss is not None
    leaving.loss.total.backward()


def _no_attention(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Stands in for attention, so that q, k and v have gradients."""
    return q + (k + v).repeat_interleave(q.shape[1] // k.shape[1], dim=1)
