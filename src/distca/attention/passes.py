"""One rank's part of a layer's attention, as plain steps: dispatch, compute, combine.

Legend: T own token rows, H heads, G key/value heads, D head size. The constructor dispatches: it
sends what peers need. ``compute`` first computes the tasks that need nothing from peers, while data
is under way, then the other tasks, and starts the combine: it sends their results home. ``combine``
waits for the results of this rank's own rows.

The steps do not use autograd, and servers keep nothing: the backward dispatch carries everything
that it needs. If all ranks run the same steps in the same order, the results are those of one
device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from distca.attention.backends.base import Attended, Gradients, PackedCall, Saved
from distca.attention.prepared import PreparedLayout, PreparedPlan
from distca.dispatch.layout import Call
from distca.dispatch.tensors import wide

Blocks = Sequence[Tensor]  # own rows, then what each peer sent


class ForwardPass:
    """Queries and keys go to the servers that need them; outputs and log-sum-exp come home."""

    @torch.no_grad()
    def __init__(self, plan: PreparedPlan, q: Tensor, k: Tensor, v: Tensor) -> None:
        assert plan.forward is not None, "this plan was prepared for backward only"
        self._plan, self._prepared = plan, plan.forward
        self._qkv = (q, k, v)
        self._result: Attended | None = None
        self._exchange = plan.exchange(self._prepared)
        self._exchange.dispatch(q, k, v)

    @classmethod
    def without_rows(cls, plan: PreparedPlan) -> ForwardPass:
        """Takes part in a layer on a rank that has no tokens in it, and only serves."""
        return cls(plan, *plan.spec.empty())

    @torch.no_grad()
    def compute(self) -> None:
        self._result = mine = self._compute_local()
        received = self._exchange.receive()
        outs, lses = self._exchange.results()
        blocks = [[own, *theirs] for own, theirs in zip(self._qkv, received, strict=True)]
        for call, packed in self._prepared.remote:
            attended = self._call(call, packed, *blocks)
            call.q.put(attended.out, [mine.out, *outs])
            call.q.put(attended.lse, [mine.lse, *lses])
        self._exchange.send_results()

    @torch.no_grad()
    def combine(self) -> Attended:
        """Returns out [T, H, D] and lse [T, H] of this rank's rows."""
        if self._result is None:
            self.compute()
        assert self._result is not None
        outs, lses = self._exchange.receive()
        sent = self._prepared.layout.q.send.values()
        for rows, out, lse in zip(sent, outs, lses, strict=True):
            rows.put(out, [self._result.out])
            rows.put(lse, [self._result.lse])
        self._exchange.close()
        return self._result

    def _compute_local(self) -> Attended:
        q, k, v = self._qkv
        if self._prepared.layout.is_one_call:
            return self._call(*self._prepared.local[0], [q], [k], [v])
        result = Attended.empty(q)  # every row is written once, here or later
        for call, packed in self._prepared.local:
            attended = self._call(call, packed, [q], [k], [v])
            call.q.put(attended.out, [result.out])
            call.q.put(attended.lse, [result.lse])
        return result

    def _call(self, call: Call, packed: PackedCall, q: Blocks, k: Blocks, v: Blocks) -> Attended:
        rows = (call.q.take(q), call.kv.take(k), call.kv.take(v))
        with self._plan.meter.time("attention", self._plan.spec.device):
            return self._plan.backend.forward(*rows, packed, self._plan.scale)


class _BackwardBlocks(NamedTuple):
    """The tensors that a backward call reads, in the order of the dispatched message."""

    q: Blocks
    k: Blocks
    v: Blocks
    out: Blocks
    lse: Blocks
    grad_out: Blocks


class BackwardPass:
    """q, k, v, out, log-sum-exp and grad_out go to the servers; dq, dk and dv come home."""

    @torch.no_grad()
    def __init__(self, plan: PreparedPlan, grad_out: Tensor, saved: Saved) -> None:
        assert plan.backward is not None, "this plan was prepared for forward only"
        self._plan, self._prepared = plan, plan.backward
        # Kernels need contiguous rows; autograd does not promise them.
        self._own = _BackwardBlocks(*([own] for own in (*saved, grad_out.contiguous())))
        self._grads: Gradients | None = None  # dk and dv in float32 or float64, to be added up
        self._exchange = plan.exchange(self._prepared)
        self._exchange.dispatch(*(own for [own] in self._own))

    @classmethod
    def without_rows(cls, plan: PreparedPlan) -> BackwardPass:
        """Takes part in a layer on a rank that has no tokens in it, and only serves."""
        q, k, v = plan.spec.empty()
        return cls(plan, q, Saved(q, k, v, *Attended.empty(q)))

    @torch.no_grad()
    def compute(self) -> None:
        self._grads = mine = self._compute_local()
        received = self._exchange.receive()
        dqs, dks, dvs = self._exchange.results()
        sums_k, sums_v = (_Sums(parts, self._prepared) for parts in (dks, dvs))
        with_received = ([*own, *theirs] for own, theirs in zip(self._own, received, strict=True))
        blocks = _BackwardBlocks(*with_received)
        for call, packed in self._prepared.remote:
            grads = self._call(call, packed, blocks)
            call.q.put(grads.dq, [mine.dq, *dqs])
            call.kv.add(grads.dk, [mine.dk, *sums_k.totals])
            call.kv.add(grads.dv, [mine.dv, *sums_v.totals])
        sums_k.write()
        sums_v.write()
        self._exchange.send_results()

    @torch.no_grad()
    def combine(self) -> Gradients:
        """Returns the gradients of this rank's rows.

        dk and dv are added in float32 or float64: what this rank computed, then what each server
        sent in the order of ranks.
        """
        if self._grads is None:
            self.compute()
        assert self._grads is not None
        mine, layout = self._grads, self._prepared.layout
        dqs, dks, dvs = self._exchange.receive()
        for rows, dq in zip(layout.q.send.values(), dqs, strict=True):
            rows.put(dq, [mine.dq])
        for rows, dk, dv in zip(layout.kv.send.values(), dks, dvs, strict=True):
            rows.add(dk, [mine.dk])
            rows.add(dv, [mine.dv])
        self._exchange.close()
        dtype = self._plan.spec.dtype
        return Gradients(mine.dq, mine.dk.to(dtype), mine.dv.to(dtype))

    def _compute_local(self) -> Gradients:
        if self._prepared.layout.is_one_call:
            return self._call(*self._prepared.local[0], self._own)
        [q], [k] = self._own.q, self._own.k
        result = Gradients(torch.empty_like(q), _zeros(k), _zeros(k))
        for call, packed in self._prepared.local:
            grads = self._call(call, packed, self._own)
            call.q.put(grads.dq, [result.dq])
            call.kv.add(grads.dk, [result.dk])
            call.kv.add(grads.dv, [result.dv])
        return result

    def _call(self, call: Call, packed: PackedCall, blocks: _BackwardBlocks) -> Gradients:
        plan = self._plan
        saved = Saved(
            q=call.q.take(blocks.q),
            k=call.kv.take(blocks.k),
            v=call.kv.take(blocks.v),
            out=call.q.take(blocks.out),
            lse=call.q.take(blocks.lse),
        )
        grad_out = call.q.take(blocks.grad_out)
        with plan.meter.time("attention", plan.spec.device):
            return plan.backend.backward(grad_out, saved, packed, plan.scale, plan.deterministic)


class _Sums:
    """Sums of the gradients of received keys, each of which is sent home once.

    If no key is in two tasks, nothing is added, and gradients are written directly to the message.
    """

    def __init__(self, parts: Sequence[Tensor], prepared: PreparedLayout) -> None:
        self._parts = parts
        once = all(call.kv.disjoint for call, _ in prepared.remote)
        self.totals = [part.zero_() if once else _zeros(part) for part in parts]

    def write(self) -> None:
        for part, total in zip(self._parts, self.totals, strict=True):
            if part is not total:
                part.copy_(total)


def _zeros(like: Tensor) -> Tensor:
    return torch.zeros_like(like, dtype=wide(like.dtype))
