"""Attention as the textbook writes it: slow, obvious, in any floating dtype. The oracle.

Legend: n queries, m keys, H heads, G key/value heads, R = H // G, D head size. Leading dimensions
are a batch. The scores of one task are held whole, [G, R, n, m].
"""

from __future__ import annotations

import torch
from torch import Tensor

from distca.attention.backends.base import (
    Attended,
    Backend,
    Gradients,
    Packed,
    Traits,
    grouping_refusal,
    wide,
)
from distca.planning.masks import FULL, Mask


class Reference(Backend):
    """Plain maths, task by task, in float32 or better."""

    name = "reference"

    def refusal(self, traits: Traits) -> str | None:
        if not traits.dtype.is_floating_point or traits.dtype.itemsize < 2:
            return f"it takes floating dtypes of 16 bits or more, not {traits.dtype}."
        return grouping_refusal(traits)

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, packed: Packed, scale: float) -> Attended:
        out = torch.empty_like(q)
        lse = q.new_empty(q.shape[:2], dtype=wide(q.dtype))
        q, k, v = (x.to(wide(q.dtype)) for x in (q, k, v))
        for rows, keys in _tasks(packed):
            visible = seen(len(q[rows]), len(k[keys]), packed.mask, q.device)
            task = dense_forward(q[rows], k[keys], v[keys], visible, scale)
            out[rows], lse[rows] = task.out.to(out.dtype), task.lse
        return Attended(out, lse)

    def _backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        packed: Packed,
        scale: float,
        deterministic: bool,
    ) -> Gradients:
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        grad_out, q, k, v, out = (x.to(wide(q.dtype)) for x in (grad_out, q, k, v, out))
        for rows, keys in _tasks(packed):
            visible = seen(len(q[rows]), len(k[keys]), packed.mask, q.device)
            task = dense_backward(
                grad_out[rows], q[rows], k[keys], v[keys], out[rows], lse[rows], visible, scale
            )
            dq[rows] = task.dq.to(dq.dtype)
            dk[keys] = task.dk.to(dk.dtype)
            dv[keys] = task.dv.to(dv.dtype)
        return Gradients(dq, dk, dv)


def seen(queries: int, keys: int, mask: Mask, device: torch.device) -> Tensor:
    """Which keys each query sees, [queries, keys] of bool, bottom-right aligned."""
    if mask.reach == FULL:
        return torch.ones(queries, keys, dtype=torch.bool, device=device)
    diagonal = torch.arange(keys - queries, keys, device=device)[:, None]
    key = torch.arange(keys, device=device)
    return (key <= diagonal) & (key > diagonal - mask.reach)


def dense_forward(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> Attended:
    """q [..., n, H, D], k and v [..., m, G, D], visible [n, m]."""
    scores = _scores(q, k, visible, scale)
    lse = scores.logsumexp(-1)  # [..., G, R, n]
    weights = (scores - lse[..., None]).exp()
    out = torch.einsum("...grnm,...mgd->...ngrd", weights, v)
    return Attended(out.flatten(-3, -2), lse.flatten(-3, -2).movedim(-1, -2))


def dense_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    visible: Tensor,
    scale: float,
) -> Gradients:
    """Shapes as in ``dense_forward``; out and lse may come from more keys than these.

    With P = exp(S - lse) and delta = sum_d grad_out * out: dV = P' grad_out,
    dS = P * (grad_out V' - delta), dQ = scale dS K, dK = scale dS' Q.
    """
    groups = k.shape[-2]
    norm = _by_group(lse.movedim(-1, -2), groups)  # [..., G, R, n]
    weights = (_scores(q, k, visible, scale) - norm[..., None]).exp()
    delta = _by_group((grad_out * out).sum(-1).movedim(-1, -2), groups)
    grad = _by_group(grad_out, groups)
    dv = torch.einsum("...grnm,...ngrd->...mgd", weights, grad)
    dscores = torch.einsum("...ngrd,...mgd->...grnm", grad, v)
    dscores = weights * (dscores - delta[..., None]) * scale
    dq = torch.einsum("...grnm,...mgd->...ngrd", dscores, k).flatten(-3, -2)
    dk = torch.einsum("...grnm,...ngrd->...mgd", dscores, _by_group(q, groups))
    return Gradients(dq, dk, dv)


def _scores(q: Tensor, k: Tensor, visible: Tensor, scale: float) -> Tensor:
    """Scaled scores [..., G, R, n, m], minus infinity where a key is not seen."""
    scores = torch.einsum("...ngrd,...mgd->...grnm", _by_group(q, k.shape[-2]), k) * scale
    return scores.masked_fill_(~visible, float("-inf"))


def _by_group(heads: Tensor, groups: int) -> Tensor:
    """[..., H, x] -> [..., G, R, x]"""
    return torch.unflatten(heads, -2, (groups, -1))


def _tasks(packed: Packed) -> list[tuple[slice, slice]]:
    """The rows of each task's queries and of its keys; tasks without queries left out."""
    q, kv = packed.q_bounds, packed.kv_bounds
    return [
        (slice(q[i], q[i + 1]), slice(kv[i], kv[i + 1]))
        for i in range(len(q) - 1)
        if q[i + 1] > q[i]
    ]
