"""An estimate of the peak memory of a training step on a rank, from sizes alone.

The estimate is not exact. It is used to refuse runs that cannot fit, and to show what needs memory.
"""

from dataclasses import asdict, dataclass

from distca.pipeline.mesh import MeshShape
from distca.planning.models import ModelShape

GIB = 1 << 30
STATE_BYTES = 16  # per parameter: weight, gradient and two moments in float32
SAVED_BYTES = 12  # of those in a checkpoint: all but the gradient
LOSS_CHUNK = 2048  # tokens whose logits and their gradients exist at the same time, in float32


@dataclass(frozen=True)
class Memory:
    """Bytes on a rank at the peak of a step."""

    state: int  # this rank's share of weights, gradients and moments
    gathered: int  # gathered weights and gradients
    activations: int  # saved for the backward pass
    logits: int
    exchange: int  # received queries, keys, values and outputs
    checkpoint: int = 0  # the copy that is written in the background, if it shares this memory

    @property
    def total(self) -> int:
        return sum(asdict(self).values())

    @property
    def saved(self) -> int:
        """Bytes of this rank's share of a checkpoint, which is copied before it is written."""
        return self.state * SAVED_BYTES // STATE_BYTES

    def table(self) -> dict[str, float]:
        """Returns GiB by purpose."""
        parts = {name: size for name, size in asdict(self).items() if size}
        parts["total"] = self.total
        return {name: num_bytes / GIB for name, num_bytes in parts.items()}


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
    """Estimates the memory of one worker.

    tokens: tokens of the worker in one micro-batch, both halves together.
    layers: layers of a pipeline stage, which also has one end of the model; all by default.
    in_flight: micro-batches whose activations the stage holds at the same time.
    parameters: the exact number of parameters, if known; it is used without a pipeline only.
    compute_bytes, reduce_bytes: bytes of an element of gathered weights and of their gradients.
    """
    layers = shape.layers if layers is None else layers
    matrices, ends = shape.layer_elements, shape.end_elements
    gathered = 3 * max(matrices, ends) * compute_bytes
    if parallel.pp > 1 or parameters is None:
        parameters = layers * matrices + (1 if parallel.pp > 1 else 2) * ends
    if parallel.gathers_once:
        gathered = parameters * (compute_bytes + reduce_bytes)
    qkvo = (shape.heads + shape.kv_heads) * (shape.head_dim + shape.value_dim)
    kept = shape.hidden + qkvo  # between seams: x, q, k, v and the attention output
    inside = 3 * shape.hidden + 3 * shape.ffn  # inside a seam; with recompute, of one at a time
    held = layers * in_flight
    per_token = (kept * held + inside * (1 if recompute else held)) * compute_bytes
    received = 2 * tokens * (qkvo + shape.heads * shape.value_dim) * compute_bytes
    return Memory(
        state=STATE_BYTES * parameters // (parallel.workers_per_stage * parallel.tp),
        gathered=gathered // parallel.tp,
        activations=tokens * per_token // parallel.tp,
        logits=2 * min(tokens, LOSS_CHUNK) * shape.vocab_size * 4,
        exchange=received // parallel.tp,
    )
