"""Attention to the keys behind queries, which two-way spans and bands add to a kernel call.

The kernel of the call attends to the keys of the mask, and a second one to the keys behind. Both
results are merged by their log-sum-exps. In the backward pass each kernel gets the merged out and
lse, and gives exactly its share of the gradients: weights are exp(score - lse), and the keys of a
query depend on each other through sum(grad_out * out) alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from distca.attention.backends.base import Attended, Gradients, Saved
from distca.attention.backends.packed import PackedCall
from distca.dispatch.kernel_sequences import KeysBehind
from distca.dispatch.tensors import to_device

Forward = Callable[[Tensor, Tensor, Tensor, PackedCall], Attended]
Backward = Callable[[Tensor, Saved, PackedCall], Gradients]


@dataclass(frozen=True, eq=False)
class PreparedKeysBehind:
    """``KeysBehind`` on a device. Keys and values are those of a whole call."""

    rows: Tensor  # [Tb] of the call's queries, in reverse order
    packed: PackedCall

    @classmethod
    def of(cls, behind: KeysBehind, device: torch.device) -> PreparedKeysBehind:
        rows = to_device(behind.rows, torch.int64, device)
        packed = PackedCall.of(behind.mask, behind.q_offsets, behind.kv_offsets, device)
        return cls(rows, packed)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, call: PackedCall, forward: Forward
    ) -> Attended:
        """Returns the attention to all keys: those of ``call``, and those behind."""
        seen = call.num_keys
        out, lse = (each.contiguous() for each in forward(q, k[:seen], v[:seen], call))
        k, v = (x[seen:].flip(0) for x in (k, v))
        behind = forward(q[self.rows], k, v, self.packed)
        merged = Attended(out[self.rows], lse[self.rows]).merge(behind)
        out[self.rows], lse[self.rows] = merged
        return Attended(out, lse)

    def backward(
        self, grad_out: Tensor, saved: Saved, call: PackedCall, backward: Backward
    ) -> Gradients:
        """Returns the gradients of q, k and v, those of the keys behind last."""
        seen, rows = call.num_keys, self.rows
        dq, dk, dv = backward(grad_out, saved.map(lambda x: x, lambda x: x[:seen]), call)
        behind = saved.map(lambda x: x[rows], lambda x: x[seen:].flip(0))
        more = backward(grad_out[rows], behind, self.packed)
        dq = dq.contiguous()
        dq[rows] += more.dq
        return Gradients(dq, torch.cat([dk, more.dk.flip(0)]), torch.cat([dv, more.dv.flip(0)]))
