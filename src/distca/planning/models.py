"""Shapes of models: the FLOPs and bytes of attention and of the linear layers, per token."""

from __future__ import annotations

from dataclasses import dataclass, replace

from distca.planning.costs.base import BACKWARD_FLOPS
from distca.schema import choose

BYTES_PER_ELEMENT = 2  # tensors are sent in bf16


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder's attention and linear layers, before tensor parallelism."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    layers: int = 1
    hidden: int = 0
    ffn: int = 0
    vocab_size: int = 0

    def __post_init__(self) -> None:
        for what in ("heads", "kv_heads", "head_dim", "layers"):
            value = getattr(self, what)
            if not isinstance(value, int) or not 1 <= value <= 1 << 20:
                raise ValueError(
                    f"{what} = {value!r} in model {self.name}: it must be a whole number, 1 or more"
                )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"{self.heads} heads over {self.kv_heads} kv heads in model {self.name}:"
                " heads must be a multiple of kv_heads"
            )

    @property
    def q_bytes(self) -> int:
        """Bytes of one token's query, or of its output, in one layer."""
        return BYTES_PER_ELEMENT * self.heads * self.head_dim

    @property
    def kv_bytes(self) -> int:
        """Bytes of one token's key and value in one layer."""
        return 2 * BYTES_PER_ELEMENT * self.kv_heads * self.head_dim

    @property
    def flops_per_pair(self) -> int:
        """FLOPs of one query-key pair in the forward pass of one layer.

        Each head computes two products of ``head_dim`` multiply-adds: QK^T and PV.
        """
        return 4 * self.heads * self.head_dim

    @property
    def linear_flops_per_token(self) -> int:
        """FLOPs of one token in the weight matrices of one layer, in the forward pass."""
        return 2 * self.layer_elements

    def step_flops(self, tokens: float, pairs: float) -> float:
        """Returns FLOPs of forward and backward, without recomputation.

        pairs: the query-key pairs of all layers together.
        """
        linear = self.layers * self.linear_flops_per_token + 2 * self.end_elements
        return 3 * linear * tokens + (1 + BACKWARD_FLOPS) * self.flops_per_pair * pairs

    @property
    def layer_elements(self) -> int:
        """Elements of the weight matrices of one layer: wq, wo, wk, wv, w1, w2 and w3."""
        attention = 2 * (self.heads + self.kv_heads) * self.head_dim * self.hidden
        return attention + 3 * self.hidden * self.ffn

    @property
    def end_elements(self) -> int:
        """Elements of the embedding, or of the output head."""
        return self.vocab_size * self.hidden

    def share(self, tp: int) -> ModelShape:
        """Returns the shape that one of ``tp`` tensor-parallel ranks computes."""
        if self.heads % tp or self.kv_heads % tp or self.ffn % tp:
            raise ValueError(
                f"tp = {tp} does not divide {self.heads} heads, {self.kv_heads} kv heads and an"
                f" ffn of {self.ffn} in model {self.name}: choose a divisor of all three"
            )
        heads, kv_heads, ffn = self.heads // tp, self.kv_heads // tp, self.ffn // tp
        return replace(self, heads=heads, kv_heads=kv_heads, ffn=ffn)


_SHAPES = (
    ModelShape("llama3-8b", 32, 8, 128, layers=32, hidden=4096, ffn=14336, vocab_size=128256),
    ModelShape("llama-34b", 64, 8, 128, layers=48, hidden=8192, ffn=22016, vocab_size=32000),
    ModelShape("llama3-70b", 64, 8, 128, layers=80, hidden=8192, ffn=28672, vocab_size=128256),
    ModelShape("llama3.2-1b", 32, 8, 64, layers=16, hidden=2048, ffn=8192, vocab_size=128256),
    ModelShape("llama3.2-3b", 24, 8, 128, layers=28, hidden=3072, ffn=8192, vocab_size=128256),
    ModelShape("qwen2.5-7b", 28, 4, 128, layers=28, hidden=3584, ffn=18944, vocab_size=152064),
    ModelShape("qwen2.5-14b", 40, 8, 128, layers=48, hidden=5120, ffn=13824, vocab_size=152064),
    ModelShape("qwen2.5-32b", 40, 8, 128, layers=64, hidden=5120, ffn=27648, vocab_size=152064),
    ModelShape("qwen2.5-72b", 64, 8, 128, layers=80, hidden=8192, ffn=29568, vocab_size=152064),
    ModelShape("qwen3-0.6b", 16, 8, 128, layers=28, hidden=1024, ffn=3072, vocab_size=151936),
    ModelShape("qwen3-8b", 32, 8, 128, layers=36, hidden=4096, ffn=12288, vocab_size=151936),
    ModelShape("qwen3-32b", 64, 8, 128, layers=64, hidden=5120, ffn=25600, vocab_size=151936),
    ModelShape(
        "llama3.1-405b", 128, 8, 128, layers=126, hidden=16384, ffn=53248, vocab_size=128256
    ),
    ModelShape("mistral-7b", 32, 8, 128, layers=32, hidden=4096, ffn=14336, vocab_size=32768),
)
MODELS = {shape.name: shape for shape in _SHAPES}


def model_shape(name: str) -> ModelShape:
    return choose(MODELS, name, "model", ", or give heads, kv_heads and head_dim")
