"""Attention sinks: one learnable score per head that takes part in the softmax and has no value.

GPT-OSS has them. With a sink s, the weight of a key is exp(score - lse') with
lse' = log(exp(lse) + exp(s)), so that weights no longer add up to 1.

[Note: sinks] A sink needs no part in kernels, messages or plans. Forward, the rank that holds the
queries replaces (out, lse) by (out * exp(lse - lse'), lse'). Backward, kernels compute weights
as exp(score - lse) and the derivative of scores as weight * (grad_out v' - sum(grad_out * out)),
which is right with the out' and lse' of all keys and the sink, as it is where a task has only some
of the keys. The sink itself is a key with weight exp(s - lse') and value 0, so its derivative is
-exp(s - lse') * sum(grad_out * out'), summed over the queries.

Legend: T tokens, H heads, D head size.
"""

import torch
from torch import Tensor

from distca.attention.backends.base import Attended
from distca.dispatch.tensors import wide

_BLOCK_ROWS = 8192  # whose products with grad_out are in memory at once, in float32 or float64


def refusal(sinks: Tensor, q: Tensor) -> str:
    """Returns why these are not the sinks of queries [T, H, D]; empty if they are."""
    heads = q.shape[1]
    if sinks.shape != (heads,):
        return f"sinks have shape {tuple(sinks.shape)}, but q has {heads} heads: give one per head"
    if not sinks.is_floating_point() or sinks.device != q.device:
        return (
            f"sinks are {sinks.dtype} on {sinks.device}, but q is {q.dtype} on {q.device}: they"
            " must be floating-point numbers on the device of q"
        )
    return ""


def add_sinks(attended: Attended, sinks: Tensor) -> Attended:
    """Returns attention with sinks [H], in the memory of that without. [Note: sinks]"""
    out, lse = attended
    total = torch.logaddexp(lse, sinks.to(lse.dtype))
    out.mul_((lse - total).exp_()[..., None])
    return Attended(out, total)


def sinks_gradient(grad_out: Tensor, attended: Attended, sinks: Tensor) -> Tensor:
    """Returns the gradient [H] of sinks, from the results with them. [Note: sinks]"""
    weights = (sinks.to(attended.lse.dtype) - attended.lse).exp_()  # [T, H]
    total = weights.new_zeros(len(sinks))
    for grad, out, weight in zip(
        *(torch.split(rows, _BLOCK_ROWS) for rows in (grad_out, attended.out, weights)), strict=True
    ):
        products = grad.to(wide(grad.dtype)) * out
        total -= (weight * products.sum(-1)).sum(0)
    return total.to(sinks.dtype)
