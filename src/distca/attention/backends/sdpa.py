"""torch's built-in kernels: the fast path on a CPU, and on CUDA the one that works without flash.

They support full rectangles and causal squares; [Note: parts] describes how a task is composed of
them.
"""

import torch
from torch import Tensor

from distca.attention.backends.base import Attended, Gradients, Saved, Scoring, Traits
from distca.attention.backends.parts import PartsBackend
from distca.attention.backends.sdpa_kernels import part_backward, part_forward
from distca.planning.masks import Mask


class Sdpa(PartsBackend):
    """The flash kernel of the CPU, or the memory-efficient kernel of CUDA."""

    name = "sdpa"
    batch_keys = 1 << 14

    def _refusal(self, traits: Traits) -> str | None:
        dtypes = [torch.float32, torch.bfloat16, torch.float16]
        if traits.device == "cpu":
            dtypes.append(torch.float64)
        elif traits.device != "cuda":
            return f"it has kernels for cpu and cuda, not for {traits.device}."
        elif wrong := [size for size in (traits.head_dim, traits.value_dim) if size % 4]:
            return f"on cuda the head size must be a multiple of 4, not {wrong[0]}."
        if traits.dtype not in dtypes:
            return f"on {traits.device} it takes {_names(dtypes)}, not {_names([traits.dtype])}."
        return None

    def _part_forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scoring: Scoring
    ) -> Attended:
        return part_forward(q, k, v, mask, scoring.scale)

    def _part_backward(
        self, grad_out: Tensor, saved: Saved, mask: Mask, scoring: Scoring, deterministic: bool
    ) -> Gradients:
        return part_backward(grad_out, saved, mask, scoring.scale, deterministic)


def _names(dtypes: list[torch.dtype]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
