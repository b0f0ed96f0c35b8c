"""What a step takes on each rank, from sizes alone.

An estimate of the largest moment: it is there to refuse what cannot fit and to show what takes the
room, not to be exact to the byte.
"""

from __future__ import annotations

from dataclasses import dataclass

from distca.pipeline.mesh import MeshShape
from distca.planning.models import ModelShape

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
    shape: ModelShape,
    parallel: MeshShape,
    tokens: int,
    *,
    recompute: bool,
    layers: int | None = None,
    in_flight: int = 1,
    parameters: int | None = None,
    compute_bytes: int = 2,
    reduce_bytes: int = 4,
) -> Memory:
    """``tokens``: of one worker in one micro-batch, both halves together.

    Of a pipeline, a stage with so many ``layers`` and one end of the model, which holds up to
    ``in_flight`` micro-batches. Weights that are kept gathered have whole gradients beside them.
    ``parameters``: of a model without a pipeline, where they are known to the last one.
    """
    layers = shape.layers if layers is None else layers
    matrices, ends = shape.layer_elements, shape.end_elements
    gathered = 3 * max(matrices, ends) * compute_bytes
    if parallel.pp > 1 or parameters is None:
        parameters = layers * matrices + (1 if parallel.pp > 1 else 2) * ends
    if parallel.gathers_once:
        gathered = parameters * (compute_bytes + reduce_bytes)
    qkvo = (2 * shape.heads + 2 * shape.kv_heads) * shape.head_dim
    kept = shape.hidden + qkvo  # between seams: x, q, k, v and what was attended
    inside = 3 * shape.hidden + 3 * shape.ffn  # of a seam, at once or one after the other
    held = layers * in_flight
    per_token = (kept * held + inside * (1 if recompute else held)) * compute_bytes
    received = 2 * tokens * (qkvo + shape.heads * shape.head_dim) * compute_bytes
    return Memory(
        state=STATE_BYTES * parameters // (parallel.workers_per_stage * parallel.tp),
        gathered=gathered // parallel.tp,
        activations=tokens * per_token // parallel.tp,
        logits=2 * min(tokens, LOSS_CHUNK) * shape.vocab_size * 4,
        exchange=received // parallel.tp,
    )
