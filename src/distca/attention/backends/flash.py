"""torch's own flash kernels for packed sequences on CUDA, which ``varlen_attn`` calls.

``torch.nn.attention.varlen.varlen_attn`` hides its backward in autograd, so this backend calls the
two operators below it. They are private. torch 2.11 to 2.13 have all arguments that are used, and
``refusal`` checks the arguments of the installed version before anything runs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from operator import itemgetter

import torch
from torch import Tensor

from distca.attention.backends.base import Attended, Backend, Gradients, Saved, Scoring, Traits
from distca.attention.backends.packed import PackedCall
from distca.attention.backends.padding import (
    one_head_size,
    one_head_size_saved,
    own_head_sizes,
)

_aten = torch.ops.aten
_SHARED = (
    "query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal",
    "scale", "window_size_left", "window_size_right",
)  # fmt: skip
_ARGUMENTS = {
    "_flash_attention_forward": (*_SHARED, "return_debug_mask"),
    "_flash_attention_backward": (
        *_SHARED, "grad_out", "out", "logsumexp", "rng_state", "unused"
    ),
}  # fmt: skip


class Flash(Backend):
    """FlashAttention 2 as built into torch. It needs one head size: the smaller one is padded."""

    name = "flash"

    def _refusal(self, traits: Traits) -> str | None:
        if refusal := traits.cuda_refusal((8, 0)):
            return refusal
        size = max(traits.head_dim, traits.value_dim)
        if size % 8 or not 8 <= size <= 256:
            return f"the head size must be a multiple of 8 up to 256, not {size}."
        return None

    def _library_refusal(self) -> str | None:
        return _operator_refusal()

    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, call: PackedCall, scoring: Scoring
    ) -> Attended:
        left, right = call.window
        size = v.shape[-1]
        q, k, v = one_head_size(q, k, v)
        out, lse, *_ = _aten._flash_attention_forward(
            q, k, v, call.q_offsets, call.kv_offsets, _max_queries(call), call.max_keys,
            0.0, (left, right) == (-1, 0), False,
            scale=scoring.scale, window_size_left=left, window_size_right=right,
        )  # fmt: skip
        return Attended(out[..., :size], lse.t().contiguous())

    def _backward(
        self,
        grad_out: Tensor,
        saved: Saved,
        call: PackedCall,
        scoring: Scoring,
        deterministic: bool,
    ) -> Gradients:
        grad_out, padded = one_head_size_saved(grad_out, saved)
        if deterministic:  # a thread block then takes several blocks of keys, and none is empty
            with _deterministic():
                grads = _backward(grad_out, padded, call, scoring)
        elif call.groups:
            grads = _backward_in_groups(grad_out, padded, call, scoring)
        else:
            grads = _backward(grad_out, padded, call, scoring)
        return own_head_sizes(grads, saved)


def _backward_in_groups(
    grad_out: Tensor, saved: Saved, call: PackedCall, scoring: Scoring
) -> Gradients:
    """Computes the gradients in several calls. [Note: empty blocks]"""
    grads = Gradients(*map(torch.empty_like, (saved.q, saved.k, saved.v)))
    for queries, keys, group in call.groups:
        some = saved.map(itemgetter(queries), itemgetter(keys))
        found = _backward(grad_out[queries], some, group, scoring)
        for whole, rows, grad in zip(grads, (queries, keys, keys), found, strict=True):
            whole[rows] = grad
    return grads


def _backward(grad_out: Tensor, saved: Saved, call: PackedCall, scoring: Scoring) -> Gradients:
    q, k, v, out, lse = saved
    left, right = call.window
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout, which is off
    found = _aten._flash_attention_backward(
        grad_out, q, k, v, out, lse.t().contiguous(), call.q_offsets, call.kv_offsets,
        _max_queries(call), call.max_keys, 0.0, (left, right) == (-1, 0), seed,
        q.new_empty(0), scale=scoring.scale, window_size_left=left, window_size_right=right,
    )  # fmt: skip
    return Gradients(*found)


def _max_queries(call: PackedCall) -> int:
    """Returns at least 2: for 1 query the kernel takes a path for decoding that splits the keys."""
    return max(call.max_queries, 2)


@contextmanager
def _deterministic() -> Iterator[None]:
    """Sets the global switch of torch, which the operator reads instead of an argument."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


def _operator_refusal() -> str | None:
    if not torch.backends.cuda.is_flash_attention_available():
        return f"this build of torch ({torch.__version__}) has no flash kernels."
    for name, needed in _ARGUMENTS.items():
        operator = getattr(_aten, name, None)
        if operator is None:
            return f"torch {torch.__version__} has no operator aten::{name}."
        known = {argument.name for argument in operator.default._schema.arguments}
        if missing := sorted(set(needed) - known):
            return f"aten::{name} of torch {torch.__version__} lacks {', '.join(missing)}."
    return None
