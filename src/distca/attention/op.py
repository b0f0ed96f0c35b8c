"""Attention of one layer as a torch op with a forward and a backward of its own.

[Note: why a custom op] Activation checkpointing may save the result of an op by name and then runs
it, and its exchange, once. Autograd inside a Function would run both again. An op accepts neither a
plan nor a process group, so it is handed an integer that leads to them.
"""

from __future__ import annotations

import itertools
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from distca.attention import passes
from distca.attention.backends.base import Attended, wide

# Weak: an execution lives as long as its plan, or as a graph that still has to run its backward.
_EXECUTIONS: WeakValueDictionary[int, passes.PreparedPlan] = WeakValueDictionary()
_handles = itertools.count()


def register(execution: passes.PreparedPlan) -> int:
    """A handle that leads to the execution while somebody holds it."""
    handle = next(_handles)
    _EXECUTIONS[handle] = execution
    return handle


def attend(q: Tensor, k: Tensor, v: Tensor, handle: int) -> Tensor:
    """q [T, H, D], k and v [T, G, D] -> [T, H, D]."""
    out: Tensor = torch.ops.distca.core_attention(q, k, v, handle)[0]
    return out


@torch.library.custom_op("distca::core_attention", mutates_args=())
def _core_attention(q: Tensor, k: Tensor, v: Tensor, handle: int) -> tuple[Tensor, Tensor]:
    attended = passes.forward(_EXECUTIONS[handle], q, k, v)
    return attended.out, attended.lse


@_core_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, handle: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[:2], dtype=wide(q.dtype))


@torch.library.custom_op("distca::core_attention_backward", mutates_args=())
def _core_attention_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, handle: int
) -> tuple[Tensor, Tensor, Tensor]:
    return passes.backward(_EXECUTIONS[handle], grad_out, q, k, v, Attended(out, lse))


@_core_attention_backward.register_fake
def _(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, handle: int
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, int], output: tuple[Tensor, ...]) -> None:
    q, k, v, handle = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.handle = handle
    ctx.execution = _EXECUTIONS.get(handle)  # keeps it alive until the graph is gone


def _differentiate(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse = ctx.saved_tensors
    # The lse is a result only so that it is saved; nobody differentiates through it.
    grads = torch.ops.distca.core_attention_backward(grad_out, q, k, v, out, lse, ctx.handle)
    return (*grads, None)


_core_attention.register_autograd(_differentiate, setup_context=_keep)
