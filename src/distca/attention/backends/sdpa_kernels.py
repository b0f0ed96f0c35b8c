"""Attention of one part of a task, as ``sdpa`` splits tasks, by the kernels that torch includes.

Legend: B batch, n queries, m keys, H heads, G key/value heads, D head size of queries and keys, V
that of values and outputs; the CPU kernel needs one size for both. Inputs are float32 or float64;
``out`` and ``lse`` of a backward may come from more keys than the part has. The operators are those
that ``scaled_dot_product_attention`` calls, which does not return the log-sum-exp.
"""

from functools import lru_cache

import torch
from torch import Tensor

from distca.attention.backends.base import Attended, Gradients, Saved, Scoring
from distca.attention.backends.padding import (
    one_head_size,
    one_head_size_saved,
    own_head_sizes,
)
from distca.attention.backends.reference import dense_backward, dense_forward, visible
from distca.planning.masks import CAUSAL, FULL, Mask

_aten = torch.ops.aten
_LSE_ALIGNMENT = 32  # the memory-efficient kernel pads the log-sum-exp to this many queries


def part_forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Attended:
    """q [B, n, H, D], k [B, m, G, D], v [B, m, G, V] -> out [B, n, H, V], lse [B, n, H]."""
    if not q.is_cuda:
        return _cpu_forward(q, k, v, mask, scale)
    if mask.reach in (FULL, CAUSAL):
        return _efficient_forward(q, k, v, mask.reach == CAUSAL, scale)
    return dense_forward(q, k, v, mask, Scoring(scale))


def part_backward(
    grad_out: Tensor, saved: Saved, mask: Mask, scale: float, deterministic: bool
) -> Gradients:
    """Returns the gradients of q [B, n, H, D], k [B, m, G, D] and v [B, m, G, V]."""
    if not grad_out.is_cuda:
        return _cpu_backward(grad_out, saved, mask, scale)
    if mask.reach in (FULL, CAUSAL):
        return _efficient_backward(grad_out, saved, mask.reach == CAUSAL, scale, deterministic)
    return dense_backward(grad_out, saved, mask, Scoring(scale))


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Attended:
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
        *(x.transpose(1, 2) for x in one_head_size(q, k, v)),
        0.0,
        mask.reach == CAUSAL,
        attn_mask=_bias(q, k, mask),
        scale=scale,
    )
    return Attended(out.transpose(1, 2)[..., : v.shape[-1]], lse.transpose(1, 2))


def _cpu_backward(grad_out: Tensor, saved: Saved, mask: Mask, scale: float) -> Gradients:
    padded = one_head_size_saved(grad_out, saved)
    grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *(x.transpose(1, 2) for x in (padded[0], *padded[1])),
        0.0,
        mask.reach == CAUSAL,
        attn_mask=_bias(saved.q, saved.k, mask),
        scale=scale,
    )
    return own_head_sizes(Gradients(*(grad.transpose(1, 2) for grad in grads)), saved)


def _bias(q: Tensor, k: Tensor, mask: Mask) -> Tensor | None:
    """Returns a window as the CPU kernel takes it: 0 for visible keys, otherwise minus infinity."""
    if mask.reach in (FULL, CAUSAL):
        return None
    return _window_bias(q.shape[1], k.shape[1], mask, q.dtype)


@lru_cache(maxsize=2)  # all blocks of a document but the first and the last have one shape
def _window_bias(queries: int, keys: int, mask: Mask, dtype: torch.dtype) -> Tensor:
    seen = visible(queries, keys, mask, torch.device("cpu"))
    bias = torch.zeros(queries, keys, dtype=dtype, device="cpu")
    return bias.masked_fill_(~seen, float("-inf"))


def _efficient_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Attended:
    """Calls the memory-efficient CUDA kernel, which does not support grouped heads."""
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    out, lse, *_ = _aten._efficient_attention_forward(
        q, k, v, None, None, None, q.shape[1], k.shape[1], 0.0, int(causal), True, scale=scale
    )
    return Attended(out, lse[..., : q.shape[1]].transpose(1, 2))


def _efficient_backward(
    grad_out: Tensor, saved: Saved, causal: bool, scale: float, deterministic: bool
) -> Gradients:
    q, k, v, out, lse = saved
    kv_heads, group = k.shape[2], q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    padding = -q.shape[1] % _LSE_ALIGNMENT
    lse = torch.nn.functional.pad(lse.transpose(1, 2), (0, padding), value=float("inf"))
    seed = torch.zeros((), dtype=torch.int64, device=q.device)  # of dropout, which is off
    dq, dk, dv, _ = _aten._efficient_attention_backward(
        grad_out, q, k, v, None, out.contiguous(), None, None, q.shape[1], k.shape[1],
        lse.contiguous(), 0.0, seed, seed, int(causal), False, scale=scale,
        num_splits_key=1 if deterministic else None,  # several are added in any order
    )  # fmt: skip
    dk, dv = (torch.unflatten(x, 2, (kv_heads, group)).sum(3) for x in (dk, dv))
    return Gradients(dq, dk, dv)
