"""What a run will take on each rank, said before it starts.

An estimate of the largest moment, from sizes alone: it is there to refuse what cannot fit and to
show what takes the room, not to be exact to the byte.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from distca.model.config import ModelConfig
from distca.runtime.mesh import Parallel
from distca.runtime.parallelize import Precision

GIB = 1 << 30
STATE_BYTES = 16  # of a parameter: itself, its gradient and two moments, float32 each
LOSS_CHUNK = 2048  # tokens whose logits exist at once, in float32, with their gradient


@dataclass(frozen=True)
class Memory:
    """Bytes on a rank."""

    state: int  # weights, gradients, moments: this rank's share
    gathered: int  # whole weights of the seams at work, and one's gradient
    activations: int  # what backward needs of this rank's tokens
    logits: int
    exchange: int  # received queries, keys and outputs, twice over

    @property
    def total(self) -> int:
        return self.state + self.gathered + self.activations + self.logits + self.exchange

    def table(self) -> dict[str, float]:
        """GiB by what takes them."""
        parts = ("state", "gathered", "activations", "logits", "exchange", "total")
        return {name: getattr(self, name) / GIB for name in parts}


def estimate(
    model: ModelConfig,
    parallel: Parallel,
    precision: Precision,
    tokens: int,
    *,
    recompute: bool,
    layers: int | None = None,
    in_flight: int = 1,
) -> Memory:
    """``tokens``: of one worker in one micro-batch, both halves together.

    Of a pipeline, a stage with so many ``layers`` and one end of the model, which holds up to
    ``in_flight`` micro-batches, and its weights and gradients gathered through the step.
    """
    width = precision.compute.itemsize
    share = parallel.placing * parallel.tp
    layers = model.layers if layers is None else layers
    matrices = model.shape.linear_flops_per_token // 2
    ends = model.vocab_size * model.hidden
    gathered = 3 * max(matrices, ends) * width
    parameters = model.num_parameters
    if parallel.pp > 1:
        parameters = layers * matrices + ends
        gathered = parameters * (width + precision.reduce.itemsize)
    qkvo = (2 * model.heads + 2 * model.kv_heads) * model.head_dim
    kept = model.hidden + qkvo  # between seams: x, q, k, v and what was attended
    inside = 3 * model.hidden + 3 * model.ffn  # of a seam, at once or one after the other
    held = layers * in_flight
    per_token = (kept * held + inside * (1 if recompute else held)) * width
    return Memory(
        state=STATE_BYTES * parameters // share,
        gathered=gathered // parallel.tp,
        activations=tokens * per_token // parallel.tp,
        logits=2 * min(tokens, LOSS_CHUNK) * model.vocab_size * 4,
        exchange=2 * tokens * (qkvo + model.heads * model.head_dim) * width // parallel.tp,
    )


def available(device: torch.device, local_ranks: int, limit_gib: float = 0.0) -> int:
    """Bytes that a rank may take: the limit that was given, or its share of the device."""
    if limit_gib:
        return int(limit_gib * GIB)
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory * 0.95)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // local_ranks


def check(memory: Memory, most: int) -> None:
    """Refuses with the numbers, and with what would help."""
    if memory.total > most:
        parts = ", ".join(f"{name} {size:.1f}" for name, size in memory.table().items())
        raise ValueError(
            f"this run needs about {memory.total / GIB:.1f} GiB per rank ({parts}) and has"
            f" {most / GIB:.1f}: take more ranks, fewer tokens per step, more micro-batches,"
            " parallel.recompute = true, a larger tp, or a smaller model"
        )
