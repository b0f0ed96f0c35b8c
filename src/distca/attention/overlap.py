"""Dispatch, compute and combine as three differentiable steps, so that two halves can take turns.

    ping = core_attention.dispatch(q, k, v, plan)   sends what peers need
    ...                                             computation of the other half
    ping.compute()                                  own tasks, then those of peers; sends results
    ...                                             computation of the other half
    out = ping.combine()                            waits for the results of own rows

Use these steps between checkpointed regions; inside one they would exchange twice.

[Note: steps of the backward pass] The backward pass has the same three steps in the same order, but
autograd runs the nodes of the graph from the newest to the oldest. So the backward of a node is not
the step of its forward, but the one at its place in that order:

    node         its forward           its backward
    _Dispatch    1st step: dispatch    3rd step: combine, which returns dq, dk and dv
    _Compute     2nd step: compute     2nd step: compute
    _Combine     3rd step: combine     1st step: dispatch, of grad_out and what was saved

Nodes of two halves alternate in the graph, so their steps alternate in the backward pass too.

[Note: edges] Autograd runs a node only after the nodes that use its outputs. So dispatch and
compute each return an empty tensor, an edge, which the next step takes as an input. Its gradient is
empty too; it only makes autograd run the nodes of combine, compute and dispatch in this order.
Sinks are used by combine, which returns their gradient. They are an input of dispatch as well, so
that all three nodes run even if only the sinks have a gradient.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from distca.attention.backends.base import Attended, Saved
from distca.attention.op import differentiable_once
from distca.attention.passes import BackwardPass, ForwardPass
from distca.attention.prepared import PreparedPlan
from distca.attention.sinks import add_sinks, sinks_gradient
from distca.dispatch.latent import Latent
from distca.dispatch.ranges import place


class SlotAttention:
    """The attention of a stage's layers in one tick, which the model calls layer by layer.

    It is no dataclass, because it is an argument of modules that FSDP shards: FSDP looks for
    tensors in dataclasses, and would copy all plans with all their spans at every seam.

    slots: [layers][halves] the prepared plans, beginning with that of ``first_layer``.
    """

    def __init__(self, slots: Sequence[Sequence[PreparedPlan]], first_layer: int) -> None:
        self.slots, self.first_layer = slots, first_layer

    def __call__(self, layer: int, half: int, q: Tensor, k: Tensor, v: Tensor) -> "AsyncAttention":
        """Dispatches one layer and half."""
        slot = self.slots[layer - self.first_layer]
        return AsyncAttention(slot[half], q, k, v, where=place("layer", layer, half, len(slot)))


class AsyncAttention:
    """The attention of one layer in progress.

    where: its layer and half, for profiles.
    """

    def __init__(
        self,
        plan: PreparedPlan,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None = None,
        latent: Latent | None = None,
        where: str = "",
    ) -> None:
        self.plan, self.where = plan, where
        self.forward: ForwardPass | None = None
        self.backward: BackwardPass | None = None
        self.inputs: tuple[Tensor, ...] = ()  # of backward, if its own graph is asked for
        self._given: tuple[Tensor | None, ...] | None = (q, k, v, sinks, *(latent or ()))
        self._versions = _versions(self._given)
        self.number = -1  # of the forward pass
        self._computed = False
        # See [Note: edges]. ``combine`` drops it: its node refers to this object, and the cycle
        # would keep both, and the graph, in memory.
        self._edge: Tensor | None = _Dispatch.apply(self, *self._given)  # type: ignore[no-untyped-call]

    def compute(self) -> None:
        """Computes own tasks and those of peers; ``combine`` does it if this was not called."""
        if self._computed:
            raise RuntimeError("this attention was computed already: call compute once")
        self._check_unchanged()
        self._edge = _Compute.apply(self, self._edge)  # type: ignore[no-untyped-call]
        self._computed = True

    def combine(self) -> Tensor:
        """Waits for results from peers, and returns the output [T, H, D]."""
        if self._given is None:
            raise RuntimeError("this attention was combined already: call combine once")
        if not self._computed:
            self.compute()
        self._check_unchanged()
        edge, self._edge = self._edge, None
        given, self._given = self._given, None
        out: Tensor = _Combine.apply(self, edge, *given)  # type: ignore[no-untyped-call]
        return out

    def _check_unchanged(self) -> None:
        assert self._given is not None
        if _versions(self._given) != self._versions:
            raise RuntimeError(
                "q, k or v was changed in place after dispatch: peers have the old values, and this"
                " rank would compute with new ones; change a copy, or wait for combine"
            )


def _versions(tensors: Sequence[Tensor | None]) -> list[int]:
    """Returns how often each tensor was changed in place, where torch counts it."""
    return [t._version for t in tensors if t is not None and not t.is_inference()]


class _Dispatch(torch.autograd.Function):
    """The oldest node: dispatches forward and combines backward."""

    @staticmethod
    def forward(
        ctx: Any,
        pending: AsyncAttention,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        _: Tensor | None,
        *latent: Tensor,
    ) -> Tensor:
        ctx.pending = pending
        factors = Latent(*latent) if latent else None
        pending.forward = ForwardPass(pending.plan, q, k, v, factors, pending.where)
        pending.number = pending.forward.number
        return q.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        assert ctx.pending.backward is not None
        grads = ctx.pending.backward.combine()
        ctx.pending.backward = None
        inputs, ctx.pending.inputs = ctx.pending.inputs, ()
        dq, dk, dv, *dlatent = differentiable_once(grads, inputs)
        return None, dq, dk, dv, None, *dlatent


class _Compute(torch.autograd.Function):
    """The node in between: computes forward and backward."""

    @staticmethod
    def forward(ctx: Any, pending: AsyncAttention, edge: Tensor) -> Tensor:
        ctx.pending = pending
        assert pending.forward is not None
        pending.forward.compute()
        return edge.new_empty(0)

    @staticmethod
    def backward(ctx: Any, edge: Tensor) -> tuple[Tensor | None, ...]:
        ctx.pending.backward.compute()
        return None, edge


class _Combine(torch.autograd.Function):
    """The newest node: combines forward and dispatches backward."""

    @staticmethod
    def forward(
        ctx: Any,
        pending: AsyncAttention,
        edge: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        *latent: Tensor,
    ) -> Tensor:
        assert pending.forward is not None
        attended = pending.forward.combine()
        pending.forward = None
        if sinks is not None:
            attended = add_sinks(attended, sinks)
        ctx.pending = pending
        ctx.save_for_backward(*Saved(q, k, v, *attended), sinks, *latent)
        return attended.out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks, *latent = ctx.saved_tensors
        saved, inputs = Saved(q, k, v, out, lse), (grad_out, q, k, v, *latent)
        factors = Latent(*latent) if latent else None
        pending = ctx.pending
        pending.backward = BackwardPass(
            pending.plan, grad_out, saved, factors, pending.where, pending.number
        )
        if torch.is_grad_enabled():
            pending.inputs = inputs
        dsinks = None
        if sinks is not None:
            with torch.no_grad():
                dsinks = sinks_gradient(grad_out, Attended(saved.out, saved.lse), sinks)
            (dsinks,) = differentiable_once([dsinks], (*inputs, sinks))
        return None, grad_out.new_empty(0), None, None, None, dsinks, *[None] * len(latent)
