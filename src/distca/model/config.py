"""The configuration of a decoder of the Llama family: sizes, rotary positions and masks."""

import math
from dataclasses import dataclass

from distca.planning.masks import CAUSAL, Mask
from distca.planning.models import ModelShape

SIZES = ("vocab_size", "hidden", "layers", "heads", "kv_heads", "head_dim", "ffn")
_LARGEST = dict.fromkeys(SIZES, 10**6) | {"vocab_size": 10**9, "layers": 10**4, "context": 10**12}


@dataclass(frozen=True)
class RopeScaling:
    """Scales rotary frequencies down for contexts longer than those of the first training.

    ``linear`` divides all frequencies by ``factor``. ``llama3`` divides those with fewer than
    ``low_freq_factor`` turns in ``original_context`` tokens, keeps those with more than
    ``high_freq_factor`` turns, and interpolates in between.
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "llama3"):
            raise ValueError(f"rope scaling {self.kind!r} is unknown: choose linear or llama3")
        if not 1 <= self.factor < math.inf:
            raise ValueError(
                f"rope scaling by factor {self.factor}: it must be at least 1; leave scaling out"
                " if the context is not extended"
            )
        if self.kind == "llama3" and not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor {self.low_freq_factor} and high_freq_factor"
                f" {self.high_freq_factor}: they must be above 0 and increase; Llama 3 has 1 and 4"
            )
        if self.original_context < 1:
            raise ValueError(
                f"original_context = {self.original_context}: it must be at least 1 token; give"
                " the context that the model was first trained with"
            )


@dataclass(frozen=True)
class ModelConfig:
    """A decoder with grouped heads, rotary positions, RMS norms and SwiGLU, without biases.

    rope_theta, rope_scaling: the rotary frequencies.
    qk_norm: queries and keys of each head have an RMS norm, as in Qwen3.
    tied: the output head uses the embedding's weight.
    window: the number of keys that a query attends to, including its own; None: all before it.
    window_pattern: with a window, every n-th layer (n - 1, 2n - 1, ...) attends to all keys
        instead. 0: every layer has the window. 1 is refused, since no layer would have it.
    context: the longest document that the weights are made for. It changes no computation.
    """

    vocab_size: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    qk_norm: bool = False
    tied: bool = False
    window: int | None = None
    window_pattern: int = 0
    context: int = 8192

    def __post_init__(self) -> None:
        for name, largest in _LARGEST.items():
            if not 1 <= getattr(self, name) <= largest:
                raise ValueError(f"{name} = {getattr(self, name)}: it must be from 1 to {largest}")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"{self.heads} heads over {self.kv_heads} kv heads: heads must be a multiple of"
                " kv_heads; change either"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"head_dim = {self.head_dim}: rotary positions rotate pairs, so it must be even;"
                f" use {self.head_dim + 1}"
            )
        for name in ("rope_theta", "norm_eps"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} = {getattr(self, name)}: it must be above 0 and finite")
        self._check_window()

    def _check_window(self) -> None:
        if self.window is None:
            if self.window_pattern:
                raise ValueError(
                    f"window_pattern = {self.window_pattern} without a window: set a window, or"
                    " leave the pattern at 0"
                )
            return
        if not 1 <= self.window < CAUSAL:
            raise ValueError(
                f"window = {self.window}: a query attends at least to its own key; set 1 or more,"
                " or None for all keys"
            )
        if self.window_pattern < 0 or self.window_pattern == 1:
            raise ValueError(
                f"window_pattern = {self.window_pattern}: it must be 0 (every layer has the"
                " window) or at least 2 (every n-th layer has none); for no window at all set"
                " window = None"
            )

    def mask_of(self, layer: int) -> Mask:
        """Returns the mask of ``layer``, counted from 0."""
        pattern = self.window_pattern
        if self.window is None or (pattern and (layer + 1) % pattern == 0):
            return Mask(CAUSAL)
        return Mask(self.window)

    @property
    def shape(self) -> ModelShape:
        """The sizes that planning needs: ``distca.plan(..., model=config.shape)``."""
        sizes = {name: getattr(self, name) for name in SIZES}
        return ModelShape(name=f"{self.layers} x {self.hidden}", **sizes)

    @property
    def num_parameters(self) -> int:
        """The number of parameters; a tied embedding counts once."""
        norms = 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)
        ends = (1 if self.tied else 2) * self.vocab_size * self.hidden + self.hidden
        return self.layers * (self.shape.layer_elements + norms) + ends
