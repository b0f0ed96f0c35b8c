"""torchtitan's own attention in any dtype and on a CPU, for tests only.

torch's varlen kernel has no CPU version, and torchtitan casts to bfloat16 for it. So
``OwnAttention`` replaces it by ``scaled_dot_product_attention`` of one document after another, and
leaves the rest of torchtitan as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torchtitan_on_cpu  # before torchtitan
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torchtitan.config.override import derive, override
from torchtitan.models.common.attention import (
    ScaledDotProductAttention,
    VarlenAttention,
    VarlenMetadata,
)

if not torch.cuda.is_available():
    torchtitan_on_cpu.stay_on_cpu()


class OwnAttention(VarlenAttention):  # type: ignore[misc]
    """torchtitan's own layer with a slow and simple kernel."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):  # type: ignore[misc]
        pass

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: VarlenMetadata,
        scale: float | None = None,
        **_: Any,
    ) -> Tensor:
        flat = [x.flatten(0, 1).transpose(0, 1) for x in (q_BLNH, k_BLNH, v_BLNH)]  # [N, T, H]
        outs = [
            scaled_dot_product_attention(
                *(x[:, start:stop] for x in flat),
                attn_mask=_seen(stop - start, self.window_size),
                scale=scale,
                enable_gqa=True,
            )
            for start, stop in pairwise(attention_masks.cu_seq_q.tolist())
        ]
        return torch.cat(outs, 1).transpose(0, 1).unflatten(0, q_BLNH.shape[:2])


def _seen(length: int, window: tuple[int, int]) -> Tensor:
    q, k = torch.arange(length)[:, None], torch.arange(length)[None]
    left, right = (length if side < 0 else side for side in window)
    return (k >= q - left) & (k <= q + right)


@override(target=VarlenAttention.Config)
def own_attention(config: Any) -> Any:
    return derive(config, OwnAttention.Config)


@override(target=VarlenAttention.Config)
def sdpa_attention(config: Any) -> Any:
    """Uses torchtitan's own attention for rows that are one document each."""
    return derive(config, ScaledDotProductAttention.Config)
