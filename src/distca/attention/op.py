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
from distca.dispatch.latent import Latent

# Weak: a prepared plan lives as long as its plan, or as a graph whose backward has not yet run.
_PREPARED: WeakValueDictionary[int, PreparedPlan] = WeakValueDictionary()
_handles = itertools.count()


def register(plan: PreparedPlan) -> int:
    """Returns a handle that is valid as long as the prepared plan is referenced elsewhere."""
    handle = next(_handles)
    _PREPARED[handle] = plan
    return handle


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    handle: int,
    sinks: Tensor | None = None,
    latent: Latent | None = None,
) -> Tensor:
    """q [T, H, D], k [T, G, D], v [T, G, V], sinks [H] -> [T, H, V]."""
    factors = [] if latent is None else list(latent)
    out: Tensor = torch.ops.distca.core_attention(q, k, v, handle, sinks, *factors)[0]
    return out


@torch.library.custom_op("distca::core_attention", mutates_args=())
def _core_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    handle: int,
    sinks: Tensor | None = None,
    latent: Tensor | None = None,
    rotary: Tensor | None = None,
    weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    factors = _factors(latent, rotary, weight)
    attended = ForwardPass(_PREPARED[handle], q, k, v, factors).combine()
    return attended if sinks is None else add_sinks(attended, sinks)


@_core_attention.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    handle: int,
    sinks: Tensor | None = None,
    latent: Tensor | None = None,
    rotary: Tensor | None = None,
    weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    return Attended.empty(q, v)


@torch.library.custom_op("distca::core_attention_backward", mutates_args=())
def _core_attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    handle: int,
    number: int,
    latent: Tensor | None = None,
    rotary: Tensor | None = None,
    weight: Tensor | None = None,
) -> list[Tensor]:
    factors, saved = _factors(latent, rotary, weight), Saved(q, k, v, out, lse)
    plan = _PREPARED[handle]
    return list(BackwardPass(plan, grad_out, saved, factors, number=number).combine())


@_core_attention_backward.register_fake
def _(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    handle: int,
    number: int,
    latent: Tensor | None = None,
    rotary: Tensor | None = None,
    weight: Tensor | None = None,
) -> list[Tensor]:
    factors = _factors(latent, rotary, weight)
    return [torch.empty_like(each) for each in (q, k, v, *(factors or ()))]


def _factors(latent: Tensor | None, rotary: Tensor | None, weight: Tensor | None) -> Latent | None:
    if latent is None or rotary is None or weight is None:
        return None
    return Latent(latent, rotary, weight)


def _save(
    ctx: Any,
    inputs: tuple[Any, ...],
    output: tuple[Tensor, Tensor],
) -> None:
    q, k, v, handle, sinks, *factors = inputs
    ctx.save_for_backward(*Saved(q, k, v, *output), sinks, *factors)
    ctx.handle = handle
    ctx.plan = plan = _PREPARED.get(handle)  # keeps it alive as long as the graph
    # That of this forward pass, which has just run; checkpointing may have kept its result.
    ctx.number = -1 if plan is None or plan.order is None else plan.order.newest


def _differentiate(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    # The lse is a result only so that it is saved; it has no gradient.
    # The tensors are read once, since checkpointing computes them again for each read.
    *saved, sinks, latent, rotary, weight = ctx.saved_tensors
    factors = _factors(latent, rotary, weight) or ()
    with torch.no_grad():
        backward = torch.ops.distca.core_attention_backward
        grads = list(backward(grad_out, *saved, ctx.handle, ctx.number, *factors))
        if sinks is not None:
            grads.append(sinks_gradient(grad_out, Attended(*saved[3:]), sinks))
    inputs = (grad_out, *saved[:3], *factors, *([] if sinks is None else [sinks]))
    dq, dk, dv, *others = differentiable_once(grads, inputs)
    dsinks = None if sinks is None else others.pop()
    return dq, dk, dv, None, dsinks, *(others or (None, None, None))


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
