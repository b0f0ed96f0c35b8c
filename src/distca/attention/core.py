"""``CoreAttention``: the differentiable whole, from packed tensors and a plan.

[Note: why a custom op] Activation checkpointing may save the result of an op by name and then runs
it, and its exchange, once. Autograd inside a Function would run both again. An op accepts neither a
plan nor a process group, so it is handed an integer that leads to them (``_EXCHANGES``).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from distca.attention import steps
from distca.attention.backend import Attended, Backend, Traits
from distca.attention.choice import choose
from distca.dispatch.layout import Layout
from distca.dispatch.transport import DistributedTransport, Transport
from distca.planning.masks import Mask
from distca.planning.plan import Plan


@dataclass(eq=False)
class _Exchange:
    """All that one plan's layers need on this rank."""

    handle: int
    forward: steps.Route
    backward: steps.Route
    transport: Transport
    backend: Backend
    scale: float
    deterministic: bool


# Weak: an exchange lives as long as its plan, or as a graph that still has to run its backward.
_EXCHANGES: WeakValueDictionary[int, _Exchange] = WeakValueDictionary()
_handles = itertools.count()


class CoreAttention:
    """softmax(QK^T)V of this rank's packed documents, computed wherever the plan says.

    Every rank of the group calls it with the same plan, once per layer and in the same order; a
    rank without tokens passes empty tensors. Outputs and gradients are those of one device.

    group: the ranks of the plan, in order; None is the default group.
    backend: a name from ``distca.attention``, or ``auto`` for the fastest that fits.
    scale: of the scores; 1 / sqrt(D) by default.
    deterministic: gradients are equal bit by bit from run to run.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        backend: str = "auto",
        scale: float | None = None,
        deterministic: bool = False,
        transport: Transport | None = None,
    ) -> None:
        self.transport = DistributedTransport(group) if transport is None else transport
        self.backend, self.scale, self.deterministic = backend, scale, deterministic
        self._known: WeakKeyDictionary[Plan, dict[Any, _Exchange]] = WeakKeyDictionary()

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> Tensor:
        """q [T, H, D], k and v [T, G, D] -> [T, H, D]; T is what the plan places on this rank."""
        self._check(q, k, v, plan)
        out, _ = torch.ops.distca.core_attention(q, k, v, self._exchange(q, k, plan).handle)
        return torch.as_tensor(out)

    def _exchange(self, q: Tensor, k: Tensor, plan: Plan) -> _Exchange:
        key = (q.device, q.dtype, q.shape[1:], k.shape[1:])
        known = self._known.setdefault(plan, {})
        if key not in known:
            masks = [Mask(reach) for reach in sorted(set(plan.reach.tolist()))]
            traits = Traits.of(q, k, masks, deterministic=self.deterministic)
            rank = self.transport.rank
            known[key] = _Exchange(
                handle=next(_handles),
                forward=steps.Route.of(Layout.of(plan, rank), q.device),
                backward=steps.Route.of(Layout.of(plan, rank, backward=True), q.device),
                transport=self.transport,
                backend=choose(self.backend, traits),
                scale=q.shape[-1] ** -0.5 if self.scale is None else self.scale,
                deterministic=self.deterministic,
            )
            _EXCHANGES[known[key].handle] = known[key]
        return known[key]

    def _check(self, q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> None:
        rank, ranks = self.transport.rank, self.transport.num_ranks
        if plan.servers.num_ranks != ranks:
            raise ValueError(
                f"the plan is for {plan.servers.num_ranks} ranks but the group has {ranks}:"
                " plan for the ranks of the group"
            )
        tokens = int(plan.placement.tokens[rank]) if rank < plan.placement.num_workers else 0
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            if tensor.ndim != 3 or tensor.shape[0] != tokens:
                raise ValueError(
                    f"{name} has shape {tuple(tensor.shape)} on rank {rank}, where the plan places"
                    f" {tokens} tokens: it must be [{tokens}, heads, head size]"
                )
            if tensor.dtype != q.dtype or tensor.device != q.device:
                raise ValueError(
                    f"{name} is {tensor.dtype} on {tensor.device} but q is {q.dtype} on {q.device}:"
                    " all three must agree"
                )
        if k.shape != v.shape or q.shape[2] != k.shape[2] or q.shape[1] % max(k.shape[1], 1):
            raise ValueError(
                f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: k and v must agree,"
                " and q have the same head size and a multiple of their heads"
            )


@torch.library.custom_op("distca::core_attention", mutates_args=())
def _core_attention(q: Tensor, k: Tensor, v: Tensor, handle: int) -> tuple[Tensor, Tensor]:
    e = _EXCHANGES[handle]
    attended = steps.forward(e.forward, e.transport, e.backend, q, k, v, e.scale)
    return attended.out, attended.lse


@_core_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, handle: int) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    return torch.empty_like(q), q.new_empty(q.shape[:2], dtype=wide)


@torch.library.custom_op("distca::core_attention_backward", mutates_args=())
def _core_attention_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, handle: int
) -> tuple[Tensor, Tensor, Tensor]:
    e = _EXCHANGES[handle]
    attended = Attended(out, lse)
    grads = steps.backward(
        e.backward,
        e.transport,
        e.backend,
        grad_out.contiguous(),
        q,
        k,
        v,
        attended,
        e.scale,
        deterministic=e.deterministic,
    )
    return grads.dq, grads.dk, grads.dv


@_core_attention_backward.register_fake
def _(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, handle: int
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, int], output: tuple[Tensor, ...]) -> None:
    q, k, v, handle = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.handle = handle
    ctx.exchange = _EXCHANGES.get(handle)  # keeps it alive until the graph is gone


def _differentiate(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse = ctx.saved_tensors
    # The lse is a result only so that it is saved; nobody differentiates through it.
    grads = torch.ops.distca.core_attention_backward(grad_out, q, k, v, out, lse, ctx.handle)
    return (*grads, None)


_core_attention.register_autograd(_differentiate, setup_context=_keep)
