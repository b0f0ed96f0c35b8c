"""A layer before and after its core attention, on packed tokens.

Legend: T tokens, H heads, G key/value heads, D head size. There is no batch axis: documents are
concatenated, and positions [T] count from 0 in each of them.

    Before   x -> q, k, v           norm, projections, rotation
    After    x, attended -> x       output projection, norm, SwiGLU, both residuals

The matrices that tensor parallelism splits are in modules that take the normed tokens once (``qkv``
and ``ffn``), so that sequence-parallel tokens are gathered once for all of them. The number of
heads is that of a projection's output, which under tensor parallelism is a rank's share.
"""

import math
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distca.model.config import ModelConfig, RopeScaling


class QKV(NamedTuple):
    q: Tensor  # [T, H, D]
    k: Tensor  # [T, G, D]
    v: Tensor  # [T, G, D]


class Before(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.hidden, config.norm_eps)
        self.qkv = Projections(config)

    def forward(self, x: Tensor, positions: Tensor) -> QKV:
        """Returns q, k and v of x [T, hidden] at positions [T]."""
        qkv: QKV = self.qkv(self.norm(x), positions)
        return qkv


class Projections(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.rope = (config.head_dim, config.rope_theta, config.rope_scaling)
        self.wq = nn.Linear(config.hidden, config.heads * config.head_dim, bias=False)
        self.wk = nn.Linear(config.hidden, config.kv_heads * config.head_dim, bias=False)
        self.wv = nn.Linear(config.hidden, config.kv_heads * config.head_dim, bias=False)
        self.q_norm = nn.RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = nn.RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, positions: Tensor) -> QKV:
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        # The input is positions, not cos and sin, since FSDP's mixed precision casts all floating
        # point inputs to bfloat16; it does not cast integers.
        angles = positions[:, None] * frequencies(*self.rope, positions.device)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]  # [T, 1, D / 2]
        # FSDP warns about views among the outputs of a module; for autograd, this is not one.
        v = torch.ops.aten._unsafe_view(v, v.shape)
        return QKV(rotate(q, cos, sin), rotate(k, cos, sin), v)


class After(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.wo = nn.Linear(config.heads * config.head_dim, config.hidden, bias=False)
        self.norm = nn.RMSNorm(config.hidden, config.norm_eps)
        self.ffn = SwiGLU(config.hidden, config.ffn)

    def forward(self, x: Tensor, attended: Tensor) -> Tensor:
        """x [T, hidden], attended [T, H, D] -> [T, hidden]"""
        x = x + self.wo(attended.flatten(-2))
        x = x + self.ffn(self.norm(x))
        return x


class SwiGLU(nn.Module):
    """w2 (silu(w1 x) * w3 x)"""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(hidden, ffn, bias=False)
        self.w2 = nn.Linear(ffn, hidden, bias=False)
        self.w3 = nn.Linear(hidden, ffn, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates pairs of elements (i, i + D / 2) of x [T, H, D], as Hugging Face does.

    cos and sin are float32, so 16-bit inputs are rotated in float32 and rounded once.
    """
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


@cache  # saves a dozen tiny kernels per layer; a buffer would be lost on the meta device
def frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None, device: torch.device
) -> Tensor:
    """Returns the rotary frequencies [D / 2] in radians per position, in float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    plain = 1.0 / theta**exponents
    if scaling is None:
        return plain
    slowed = plain / scaling.factor
    if scaling.kind == "linear":
        return slowed
    turns = scaling.original_context * plain / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return slowed + kept * (plain - slowed)
