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

# Weak: a prepared plan lives as long as its plan, or as a graph whose backward has not yet run.
_PREPARED: WeakValueDictionary[int, PreparedPlan] = WeakValueDictionary()
_handles = itertools.count()


def register(plan: PreparedPlan) -> int:
    """Returns a handle that is valid as long as the prepared plan is referenced elsewhere."""
    handle = next(_handles)
    _PREPARED[handle] = plan
    return handle


def attend(q: Tensor, k: Tensor, v: Tensor, handle: int) -> Tensor:
    """q [T, H, D], k and v [T, G, D] -> [T, H, D]."""
    out: Tensor = torch.ops.distca.core_attention(q, k, v, handle)[0]
    return out


@torch.library.custom_op("distca::core_attention", mutates_args=())
def _core_attention(q: Tensor, k: Tensor, v: Tensor, handle: int) -> tuple[Tensor, Tensor]:
    return ForwardPass(_PREPARED[handle], q, k, v).combine()


@_core_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, handle: int) -> tuple[Tensor, Tensor]:
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


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, int], output: tuple[Tensor, ...]) -> None:
    q, k, v, handle = inputs
    ctx.save_for_backward(*Saved(q, k, v, *output))
    ctx.handle = handle
    ctx.plan = _PREPARED.get(handle)  # keeps it alive as long as the graph


def _differentiate(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    # The lse is a result only so that it is saved; it has no gradient.
    saved = ctx.saved_tensors  # read once, since checkpointing computes them again for each read
    with torch.no_grad():
        grads = torch.ops.distca.core_attention_backward(grad_out, *saved, ctx.handle)
    return (*differentiable_once(grads, (grad_out, *saved[:3])), None)


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
