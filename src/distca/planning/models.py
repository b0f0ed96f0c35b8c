"""Shapes of models: the FLOPs and bytes of attention and of the linear layers, per token."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from distca.planning.costs.base import BACKWARD_FLOPS
from distca.schema import choose

BYTES_PER_ELEMENT = 2  # tensors are sent in bf16


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder's attention and linear layers, before tensor parallelism.

    v_head_dim: the head size of values and outputs; by default (0) that of queries and keys.
    latent_dim, rope_dim: the sizes of a latent and of the rotary part of a key, if these are sent
        instead of keys and values (docs/attention.md, "Latent attention"); 0: they are not.
    """

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    layers: int = 1
    hidden: int = 0
    ffn: int = 0
    vocab_size: int = 0
    v_head_dim: int = 0
    latent_dim: int = 0
    rope_dim: int = 0

    def __post_init__(self) -> None:
        for what in ("heads", "kv_heads", "head_dim", "value_dim", "layers"):
            value = getattr(self, what)
            if not isinstance(value, int) or not 1 <= value <= 1 << 20:
                raise ValueError(
                    f"{what} = {value!r} in model {self.name}: it must be a whole number from 1 to"
                    f" {1 << 20}"
                )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"{self.heads} heads over {self.kv_heads} kv heads in model {self.name}:"
                " heads must be a multiple of kv_heads"
            )
        if self.latent_dim or self.rope_dim:
            _check_latent(self)

    @property
    def value_dim(self) -> int:
        """The head size of values and outputs."""
        return self.v_head_dim or self.head_dim

    @cached_property
    def q_bytes(self) -> int:
        """Bytes of one token's query in one layer."""
        return BYTES_PER_ELEMENT * self.heads * self.head_dim

    @cached_property
    def o_bytes(self) -> int:
        """Bytes of one token's output in one layer."""
        return BYTES_PER_ELEMENT * self.heads * self.value_dim

    @cached_property
    def qo_bytes(self) -> int:
        """Bytes of one token's query and output in one layer."""
        return self.q_bytes + self.o_bytes

    @cached_property
    def kv_bytes(self) -> int:
        """Bytes of one token's key and value in one layer, as they are sent."""
        if self.latent_dim:
            return BYTES_PER_ELEMENT * (self.latent_dim + self.rope_dim)
        return self.kv_memory_bytes

    @cached_property
    def kv_memory_bytes(self) -> int:
        """Bytes of one token's key and value in one layer, as kernels read them."""
        return BYTES_PER_ELEMENT * self.kv_heads * (self.head_dim + self.value_dim)

    @cached_property
    def token_bytes(self) -> int:
        """Bytes of q, k, v and o of one token in one layer, in memory."""
        return self.qo_bytes + self.kv_memory_bytes

    @cached_property
    def expansion_bytes(self) -> int:
        """Bytes of the matrix that expands latents, which servers without weights are sent."""
        columns = self.kv_heads * (self.head_dim - self.rope_dim + self.value_dim)
        return BYTES_PER_ELEMENT * self.latent_dim * columns

    @property
    def flops_per_pair(self) -> int:
        """FLOPs of one query-key pair in the forward pass of one layer.

        Each head computes ``head_dim`` multiply-adds for QK^T and ``value_dim`` for PV.
        """
        return 2 * self.heads * (self.head_dim + self.value_dim)

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
        """Elements of the weight matrices of one layer: wq, wk, wv, wo, w1, w2 and w3."""
        return self.elements_before + self.elements_after

    @property
    def elements_before(self) -> int:
        """Elements of the weight matrices of one layer before its attention: wq, wk and wv."""
        kv_size = self.kv_heads * (self.head_dim + self.value_dim)
        return self.hidden * (self.heads * self.head_dim + kv_size)

    @property
    def elements_after(self) -> int:
        """Elements of the weight matrices of one layer behind its attention: wo, w1, w2 and w3."""
        return self.hidden * (self.heads * self.value_dim + 3 * self.ffn)

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


def _check_latent(shape: ModelShape) -> None:
    latent, rope = shape.latent_dim, shape.rope_dim
    whole = isinstance(latent, int) and isinstance(rope, int)
    if not whole or not (1 <= latent <= 1 << 20 and 0 <= rope < shape.head_dim):
        raise ValueError(
            f"latent_dim = {shape.latent_dim!r} and rope_dim = {shape.rope_dim!r} in model"
            f" {shape.name}: a latent has 1 or more elements, and the rotary part of a key fewer"
            f" than its {shape.head_dim}"
        )


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
    # Their experts are no dense feed-forward layers, so these have the sizes of attention alone.
    *(
        ModelShape(name, n, n, 192, layers=layers, v_head_dim=128, latent_dim=512, rope_dim=64)
        for name, n, layers in (
            ("deepseek-v2-lite", 16, 27),
            ("deepseek-v2", 128, 60),
            ("deepseek-v3", 128, 61),
        )
    ),
)
MODELS = {shape.name: shape for shape in _SHAPES}


def model_shape(name: str) -> ModelShape:
    return choose(MODELS, name, "model", ", or give heads, kv_heads and head_dim")
