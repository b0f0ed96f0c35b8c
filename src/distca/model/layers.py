"""The two sides of a layer's attention, on packed tokens.

Legend: T tokens, H heads, G key/value heads, D head size. There is no batch axis: documents lie end
to end, and positions [T] say where each token stands in its own.

    Before   x -> q, k, v           norm, projections, rotation
    After    x, attended -> x       output projection, norm, SwiGLU, both residuals

What tensor parallelism splits stands in a module that gets the normed tokens once (``qkv`` and
``ffn``), so that sequence-parallel tokens are gathered once for all of its matrices. Heads are
counted from what a projection returns, which is then a rank's share.
"""

from __future__ import annotations

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
        """x [T, hidden], positions [T] of integers."""
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
        # Positions come in rather than cos and sin: FSDP's mixed precision would cast these to
        # bfloat16, as it does with all floating inputs; integers it leaves alone.
        angles = positions[:, None] * frequencies(*self.rope, positions.device)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]  # [T, 1, D / 2]
        # The same memory, but not a view to autograd: FSDP warns of views that leave a module.
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
    """x [T, H, D]; element i makes a pair with i + D / 2, as in the weights of Hugging Face.

    cos and sin are float32, so 16-bit inputs are turned in float32 and rounded once.
    """
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


@cache  # a dozen tiny kernels otherwise, in every layer; and a buffer would be lost on meta
def frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None, device: torch.device
) -> Tensor:
    """[D / 2] of float32: radians per position."""
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
