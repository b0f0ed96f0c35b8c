"""Random tensors of a plan's documents, and what one device makes of them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from distca.planning.masks import FULL
from distca.planning.plan import Plan

HEADS, KV_HEADS, HEAD_DIM, SCALE = 4, 2, 8, 0.3
EXACT = {torch.float64: 1e-10, torch.float32: 1e-5}


class Tokens:
    """Random q, k, v and grad_out of every document, and where each rank's rows come from."""

    def __init__(self, plan: Plan, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        self.plan = plan
        placement = plan.placement
        self.first = np.concatenate([[0], np.cumsum(placement.lengths)])
        total = int(self.first[-1])

        def draw(heads: int) -> Tensor:
            return torch.randn(total, heads, HEAD_DIM, dtype=dtype, generator=generator)

        self.q, self.k, self.v = draw(HEADS), draw(KV_HEADS), draw(KV_HEADS)
        self.grad_out = draw(HEADS)

    def rows(self, rank: int) -> Tensor:
        """Global rows of a rank's packed tensors, in order."""
        placement = self.plan.placement
        mine = np.flatnonzero(placement.worker == rank)
        spans = [
            np.arange(placement.start[s], placement.stop[s]) + self.first[placement.document[s]]
            for s in mine
        ]
        return torch.from_numpy(np.concatenate(spans) if spans else np.zeros(0, np.int64))

    def expected(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Dense softmax over each document's mask; gradients by autograd."""
        q, k, v = (t.clone().requires_grad_() for t in (self.q, self.k, self.v))
        out = []
        for document, length in enumerate(self.plan.placement.lengths.tolist()):
            span = slice(int(self.first[document]), int(self.first[document]) + length)
            reach = int(self.plan.reach[document])
            position = torch.arange(length)
            behind = position[:, None] - position[None, :]
            visible = (behind >= 0) & (behind < reach) if reach != FULL else behind > -length
            keys = k[span].repeat_interleave(HEADS // KV_HEADS, 1)
            values = v[span].repeat_interleave(HEADS // KV_HEADS, 1)
            scores = torch.einsum("nhd,mhd->hnm", q[span], keys) * SCALE
            weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
            out.append(torch.einsum("hnm,mhd->nhd", weights, values))
        whole = torch.cat(out)
        whole.backward(self.grad_out)
        assert q.grad is not None
        assert k.grad is not None
        assert v.grad is not None
        return whole.detach(), q.grad, k.grad, v.grad
