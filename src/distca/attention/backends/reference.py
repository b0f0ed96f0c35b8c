"""Textbook attention: slow, obvious, in any floating dtype. The oracle of the other backends.

Legend: n queries, m keys, H heads, G key/value heads, R = H // G, D head size of queries and keys,
V that of values. Leading dimensions are a batch. All scores of a task are in memory at once, as
[G, R, n, m].
"""

from operator import itemgetter

import torch
from torch import Tensor

from distca.attention.backends.base import Attended, Backend, Gradients, Saved, Scoring, Traits
from distca.attention.backends.packed import PackedCall
from distca.dispatch.tensors import wide
from distca.planning.masks import FULL, Mask


class Reference(Backend):
    """Plain arithmetic, task by task, in float32 or float64."""

    name = "reference"
    caps_scores = True

    def _refusal(self, traits: Traits) -> str | None:
        return dense_refusal(traits)

    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, call: PackedCall, scoring: Scoring
    ) -> Attended:
        result = out, lse = Attended.empty(q, v)
        q, k, v = (x.to(wide(q.dtype)) for x in (q, k, v))
        for rows, keys in _tasks(call):
            task = dense_forward(q[rows], k[keys], v[keys], call.mask, scoring)
            out[rows], lse[rows] = task.out.to(out.dtype), task.lse
        return result

    def _backward(
        self,
        grad_out: Tensor,
        saved: Saved,
        call: PackedCall,
        scoring: Scoring,
        deterministic: bool,
    ) -> Gradients:
        grads = Gradients(*map(torch.zeros_like, saved[:3]))
        grad_out, *tensors = (x.to(wide(saved.q.dtype)) for x in (grad_out, *saved))
        for rows, keys in _tasks(call):
            part = Saved(*tensors).map(itemgetter(rows), itemgetter(keys))
            task = dense_backward(grad_out[rows], part, call.mask, scoring)
            for total, grad, where in zip(grads, task, (rows, keys, keys), strict=True):
                total[where] = grad.to(total.dtype)
        return grads


def dense_refusal(traits: Traits) -> str | None:
    if not traits.dtype.is_floating_point or traits.dtype.itemsize < 2:
        return f"it takes floating dtypes of 16 bits or more, not {traits.dtype}."
    return None


def visible(num_queries: int, num_keys: int, mask: Mask, device: torch.device) -> Tensor:
    """Returns which keys each query sees, [n, m] of bool, bottom-right aligned."""
    if mask.reach == FULL:
        return torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
    diagonal = torch.arange(num_keys - num_queries, num_keys, device=device)[:, None]
    key = torch.arange(num_keys, device=device)
    return (key <= diagonal) & (key > diagonal - mask.reach)


def dense_forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scoring: Scoring) -> Attended:
    """Attends with q [..., n, H, D] to k [..., m, G, D] and v [..., m, G, V].

    Autograd can differentiate it.
    """
    scores = _hide(_scores(q, k, scoring), mask)
    lse = scores.logsumexp(-1)  # [..., G, R, n]
    weights = (scores - lse[..., None]).exp()
    out = torch.einsum("...grnm,...mgd->...ngrd", weights, v)
    return Attended(out.flatten(-3, -2), lse.flatten(-3, -2).movedim(-1, -2))


def dense_backward(grad_out: Tensor, saved: Saved, mask: Mask, scoring: Scoring) -> Gradients:
    """Shapes are those of ``dense_forward``; out and lse may come from more keys than these.

    With P = exp(S - lse) and delta = sum_d grad_out * out: dV = P' grad_out,
    dS = P * (grad_out V' - delta), dQ = scale dS K, dK = scale dS' Q. The derivative of a capped
    score by the score before is 1 - (S / softcap)^2, by which dS is multiplied.
    """
    q, k, v, out, lse = saved
    groups = k.shape[-2]
    norm = _by_group(lse.movedim(-1, -2), groups)  # [..., G, R, n]
    scores = _scores(q, k, scoring)
    slope = 1 - (scores / scoring.softcap) ** 2 if scoring.softcap else 1.0
    weights = (_hide(scores, mask) - norm[..., None]).exp()
    delta = _by_group((grad_out * out).sum(-1).movedim(-1, -2), groups)
    grad = _by_group(grad_out, groups)
    dv = torch.einsum("...grnm,...ngrd->...mgd", weights, grad)
    dscores = torch.einsum("...ngrd,...mgd->...grnm", grad, v)
    dscores = weights * (dscores - delta[..., None]) * (slope * scoring.scale)
    dq = torch.einsum("...grnm,...mgd->...ngrd", dscores, k).flatten(-3, -2)
    dk = torch.einsum("...grnm,...ngrd->...mgd", dscores, _by_group(q, groups))
    return Gradients(dq, dk, dv)


def _scores(q: Tensor, k: Tensor, scoring: Scoring) -> Tensor:
    """Returns the scores [..., G, R, n, m] of all keys."""
    scores = torch.einsum("...ngrd,...mgd->...grnm", _by_group(q, k.shape[-2]), k) * scoring.scale
    cap = scoring.softcap
    return torch.tanh(scores / cap) * cap if cap else scores


def _hide(scores: Tensor, mask: Mask) -> Tensor:
    """Sets the scores of keys that are not visible to minus infinity."""
    num_queries, num_keys = scores.shape[-2:]
    seen = visible(num_queries, num_keys, mask, scores.device)
    return scores.masked_fill_(~seen, float("-inf"))


def _by_group(heads: Tensor, groups: int) -> Tensor:
    """[..., H, x] -> [..., G, R, x]"""
    return torch.unflatten(heads, -2, (groups, -1))


def _tasks(call: PackedCall) -> list[tuple[slice, slice]]:
    """Returns the rows of each task's queries and of its keys, without tasks that have no query."""
    q, kv = call.q_bounds, call.kv_bounds
    return [
        (slice(q[i], q[i + 1]), slice(kv[i], kv[i + 1]))
        for i in range(len(q) - 1)
        if q[i + 1] > q[i]
    ]
