"""The attention of one layer as a torch operator with its own backward.

[Note: why a custom op] Selective activation checkpointing can save the result of an operator by
name, and then runs it and its exchange once; an autograd Function would run again in backward. An
operator accepts neither a plan nor a process group, so it takes an integer handle that stands for a
prepared plan.
"""

import itertools
from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from distca.attention.backends.base import Attended, Saved
from distca.attention.passes import BackwardPass, ForwardPass
from distca.attention.prepared import PreparedPlan
from distca.attention.sinks import add_sinks, sinks_gradient

# Weak: a prepared plan lives as long as its plan, or as a graph whose backward has not yet run.
_PREPARED: WeakValueDictionary[int, PreparedPlan] = WeakValueDictionary()
_handles = itertools.count()


def register(plan: PreparedPlan) -> int:
    """Returns a handle that is valid as long as the prepared plan is referenced elsewhere."""
    handle = next(_handles)
    _PREPARED[handle] = plan
    return handle


def attend(q: Tensor, k: Tensor, v: Tensor, handle: int, sinks: Tensor | None = None) -> Tensor:
    """q [T, H, D], k and v [T, G, D], sinks [H] -> [T, H, D]."""
    out: Tensor = torch.ops.distca.core_attention(q, k, v, handle, sinks)[0]
    return out


@torch.library.custom_op("distca::core_attention", mutates_args=())
def _core_attention(
    q: Tensor, k: Tensor, v: Tensor, handle: int, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    attended = ForwardPass(_PREPARED[handle], q, k, v).combine()
    return attended if sinks is None else add_sinks(attended, sinks)


@_core_attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, handle: int, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    return Attended.empty(q)


@torch.library.custom_op("distca::core_attention_backward", mutates_args=())
def _core_attention_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, handle: int
) -> tuple[Tensor, Tensor, Tensor]:
    return BackwardPass(_PREPARED[handle], grad_out, Saved(q, k, v, out, lse)).combine()


@_core_attention_backward.register_fake
def _(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, handle: int
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save(
    ctx: Any,
    inputs: tuple[Tensor, Tensor, Tensor, int, Tensor | None],
    output: tuple[Tensor, Tensor],
) -> None:
    q, k, v, handle, sinks = inputs
    ctx.save_for_backward(*Saved(q, k, v, *output), sinks)
    ctx.handle = handle
    ctx.plan = _PREPARED.get(handle)  # keeps it alive as long as the graph


def _differentiate(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    # The lse is a result only so that it is saved; it has no gradient.
    # The tensors are read once, since checkpointing computes them again for each read.
    *saved, sinks = ctx.saved_tensors
    with torch.no_grad():
        grads = list(torch.ops.distca.core_attention_backward(grad_out, *saved, ctx.handle))
        if sinks is not None:
            grads.append(sinks_gradient(grad_out, Attended(*saved[3:]), sinks))
    inputs = (grad_out, *saved[:3], *([] if sinks is None else [sinks]))
    dq, dk, dv, *dsinks = differentiable_once(grads, inputs)
    return dq, dk, dv, None, dsinks[0] if dsinks else None


def differentiable_once(grads: Sequence[Tensor], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Returns gradients that cannot be differentiated by ``inputs``, instead of wrongly."""
    if not torch.is_grad_enabled():  # as in every backward without create_graph
        return tuple(grads)
    once: tuple[Tensor, ...] = _Once.apply(len(grads), *grads, *inputs)  # type: ignore[no-untyped-call]
    return once


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, num_grads: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(grad.view_as(grad) for grad in tensors[:num_grads])

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        raise RuntimeError(
            "core attention can be differentiated once, not twice: compute second derivatives, such"
            " as a gradient penalty, with another attention"
        )


_core_attention.register_autograd(_differentiate, setup_context=_save)
