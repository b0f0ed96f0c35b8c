"""Slow and obvious: attention of packed documents one by one, and a tiny model."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from distca.model.config import ModelConfig
from distca.model.llama import Attend
from distca.planning.masks import Mask

TINY: dict[str, Any] = {
    "vocab_size": 37,
    "hidden": 24,
    "layers": 3,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 8,
    "ffn": 20,
}


def tiny(**changes: Any) -> ModelConfig:
    return ModelConfig(**(TINY | changes))


def positions_of(lengths: Sequence[int]) -> Tensor:
    return torch.cat([torch.arange(length) for length in lengths])


def attention(lengths: Sequence[int], mask_of: Callable[[int], Mask]) -> Attend:
    """Whole documents, a dense mask, one softmax."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        outs = []
        for q1, k1, v1 in zip(*(t.split(list(lengths)) for t in (q, k, v)), strict=True):
            k1, v1 = k1.repeat_interleave(groups, 1), v1.repeat_interleave(groups, 1)
            place = torch.arange(len(q1))
            behind = place[:, None] - place
            visible = (behind >= 0) & (behind < mask_of(layer).reach)
            scores = torch.einsum("nhd,mhd->hnm", q1, k1) / q1.shape[-1] ** 0.5
            weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
            outs.append(torch.einsum("hnm,mhd->nhd", weights, v1))
        return torch.cat(outs)

    return attend
