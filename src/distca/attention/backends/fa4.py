"""flash-attn-4 (the extra ``fa4``), compiled at first use, for Hopper and newer.

Its autograd function keeps tensors from forward to backward, so this backend calls the two
functions below it. They are private, so their parameters are checked before anything runs. Both
have a parameter for a soft cap, which the backward of some versions accepts and ignores. So this
backend does not cap scores.
"""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from threading import Lock
from typing import Any

from torch import Tensor

from distca.attention.backends.base import Attended, Backend, Gradients, Saved, Scoring, Traits
from distca.attention.backends.packed import PackedCall

_one_at_a_time = Lock()  # two threads in its compiler at the same time abort the process
_MODULE = "flash_attn.cute.interface"
# Calls whose longest task fits into one tile have kernels of their own, which would be compiled in
# the middle of a run. A larger bound, of two of the largest tiles, gives all calls the same ones.
_LEAST_ROWS = 512
_LATENT_SIZES = (192, 128)  # of queries and keys, and of values, as in DeepSeek-V2 and V3
_SHARED = (
    "q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale",
    "causal", "window_size_left", "window_size_right",
)  # fmt: skip
_PARAMETERS = {
    "_flash_attn_fwd": (*_SHARED, "return_lse"),
    "_flash_attn_bwd": (*_SHARED, "out", "dout", "lse", "deterministic"),
}


class FlashAttention4(Backend):
    name = "fa4"

    def _refusal(self, traits: Traits) -> str | None:
        if refusal := traits.cuda_refusal((9, 0)):
            return refusal
        assert traits.capability is not None
        if traits.deterministic and traits.capability >= (12, 0):
            return "its backward has no deterministic mode from compute capability 12.0 on."
        hopper, size = traits.capability < (10, 0), traits.head_dim
        if (size, traits.value_dim) == _LATENT_SIZES and traits.capability < (12, 0):
            return None
        if size != traits.value_dim:
            return (
                f"head sizes of {size} for queries and keys and {traits.value_dim} for values: it"
                " takes one size, or (before compute capability 12.0) 192 and 128."
            )
        if size % 8 == 0 and 8 <= size <= (256 if hopper else 128):
            return None
        if size == 256 and traits.capability < (12, 0):
            return None
        most = "256" if hopper else "128, or 256 before compute capability 12.0"
        return f"the head size must be a multiple of 8 up to {most}, not {size}."

    def _library_refusal(self) -> str | None:
        return _load().refusal

    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, call: PackedCall, scoring: Scoring
    ) -> Attended:
        with _one_at_a_time:
            out, lse, *_ = _load().forward(
                q, k, v, softmax_scale=scoring.scale, return_lse=True, **_arguments(call)
            )
        return Attended(out, lse.t().contiguous())

    def _backward(
        self,
        grad_out: Tensor,
        saved: Saved,
        call: PackedCall,
        scoring: Scoring,
        deterministic: bool,
    ) -> Gradients:
        q, k, v, out, lse = saved
        with _one_at_a_time:
            dq, dk, dv = _load().backward(
                q, k, v, out, grad_out.contiguous(), lse.t().contiguous(),
                softmax_scale=scoring.scale, deterministic=deterministic, **_arguments(call),
            )  # fmt: skip
        return Gradients(dq, dk, dv)


def _arguments(call: PackedCall) -> dict[str, Any]:
    """Returns the offsets and the mask of a call; for these kernels, None means all keys."""
    left, right = call.window
    return {
        "cu_seqlens_q": call.q_offsets,
        "cu_seqlens_k": call.kv_offsets,
        "max_seqlen_q": max(call.max_queries, _LEAST_ROWS),
        "max_seqlen_k": max(call.max_keys, _LEAST_ROWS),
        "causal": (left, right) == (-1, 0),
        "window_size_left": None if left < 0 else left,
        "window_size_right": None if left < 0 else right,
    }


def _unavailable(*_: Any, **__: Any) -> Any:
    raise RuntimeError(f"flash-attn-4 cannot be used: {_load().refusal}")


@dataclass(frozen=True)
class _Kernels:
    refusal: str | None
    forward: Callable[..., Any] = _unavailable
    backward: Callable[..., Any] = _unavailable


@cache
def _load() -> _Kernels:
    try:
        module = importlib.import_module(_MODULE)
    except ModuleNotFoundError as error:
        return _Kernels(f"flash-attn-4 is not installed ({error}); pip install 'distca[fa4]'.")
    except Exception as error:  # it loads compilers and drivers, which may raise anything
        return _Kernels(f"flash-attn-4 cannot be imported: {type(error).__name__}: {error}.")
    for name, needed in _PARAMETERS.items():
        function = getattr(module, name, None)
        if function is None:
            return _Kernels(f"this version of flash-attn-4 has no {name}.")
        if missing := sorted(set(needed) - set(inspect.signature(function).parameters)):
            return _Kernels(f"{name} of this version of flash-attn-4 lacks {', '.join(missing)}.")
    return _Kernels(None, module._flash_attn_fwd, module._flash_attn_bwd)
