"""The first call of a backend's kernels, before any exchange.

CUDA loads a kernel at its first use, and may wait for the device to do so; flash-attn-4 compiles
it, for seconds. In a layer, that would come between an exchange and its match on other ranks, which
wait for it, or for which it waits where they share a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from distca.attention.backends.base import Backend, Saved, Scoring
from distca.attention.backends.packed import PackedCall
from distca.dispatch.tensors import TensorSpec
from distca.planning.masks import CAUSAL, FULL, Mask

NUM_TOKENS = 256
# A window that is longer than a call's documents is causal there.
REACHES = {"causal": (CAUSAL,), "full": (FULL,), "window": (CAUSAL, NUM_TOKENS // 2)}


def load_kernels(
    backend: Backend,
    spec: TensorSpec,
    kinds: Iterable[str],
    scoring: Scoring,
    *,
    backward: bool,
) -> None:
    """Computes a document of some tokens under a mask of each kind.

    kinds: see ``base.kind_of``.
    backward: whether its gradients are computed as well.
    """
    spec, offsets = spec.expanded, np.array([0, NUM_TOKENS])
    sizes = (spec.heads, spec.head_dim), (spec.kv_heads, spec.head_dim)
    q, k, v = (
        torch.zeros(NUM_TOKENS, *size, dtype=spec.dtype, device=spec.device)
        for size in (*sizes, (spec.kv_heads, spec.v_head_dim))
    )
    for reach in sorted({reach for kind in kinds for reach in REACHES[kind]}):
        call = PackedCall.of(Mask(reach), offsets, offsets, spec.device)
        attended = backend.forward(q, k, v, call, *scoring)
        if backward:
            saved = Saved(q, k, v, *attended)
            grad_out = torch.zeros_like(attended.out)
            backend.backward(grad_out, saved, call, scoring.scale, softcap=scoring.softcap)
