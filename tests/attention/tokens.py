"""Random tensors of a plan's documents, and the results of one device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from distca.planning.masks import BAND, FULL
from distca.planning.plan import Plan

SCALE = 0.3
EXACT = {torch.float64: 1e-10, torch.float32: 1e-5}
NAMES = ("out", "dq", "dk", "dv", "dsinks")
Heads = tuple[int, int, int]  # query heads, key/value heads, head size
GROUPED: Heads = (4, 2, 8)


class Tokens:
    """Random q, k, v and grad_out of every document, and where each rank's rows come from.

    sinks: whether there are random sinks too; then their gradient is the last of all results.
    softcap: of the scores; 0 does not cap them.
    """

    def __init__(
        self,
        plan: Plan,
        dtype: torch.dtype,
        heads: Heads = GROUPED,
        *,
        sinks: bool = False,
        softcap: float = 0.0,
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        self.plan = plan
        placement = plan.placement
        self.prefix = placement.prefixes.length
        self.first = np.concatenate([[0], np.cumsum(placement.lengths - self.prefix)])
        total = int(self.first[-1])
        query_heads, kv_heads, size = heads

        def draw(heads: int) -> Tensor:
            return torch.randn(total, heads, size, dtype=torch.float64, generator=generator).to(
                dtype
            )

        self.q, self.k, self.v = draw(query_heads), draw(kv_heads), draw(kv_heads)
        self.grad_out = draw(query_heads)
        drawn = torch.randn(query_heads, dtype=torch.float64, generator=generator) * 2
        self.sinks = drawn.to(dtype) if sinks else None
        self.softcap = softcap

    def document(self, number: int) -> slice:
        return slice(int(self.first[number]), int(self.first[number + 1]))

    def keys(self, number: int) -> list[int]:
        """Global rows of all tokens that a document's last query sees, its ancestors' first."""
        prefixes, span = self.plan.placement.prefixes, self.document(number)
        before = self.keys(int(prefixes.parent[number])) if self.prefix[number] else []
        return before[: int(self.prefix[number])] + list(range(span.start, span.stop))

    def rows(self, rank: int) -> Tensor:
        """Global rows of a rank's packed tensors, in order."""
        placement = self.plan.placement
        mine = np.flatnonzero(placement.worker == rank)
        spans = [
            np.arange(placement.start[s], placement.stop[s])
            + (self.first[placement.document[s]] - self.prefix[placement.document[s]])
            for s in mine
        ]
        return torch.from_numpy(np.concatenate(spans) if spans else np.zeros(0, np.int64))

    def of_rank(self, rank: int) -> list[Tensor]:
        """q, k, v and grad_out of a rank's rows."""
        rows = self.rows(rank)
        return [t[rows] for t in (self.q, self.k, self.v, self.grad_out)]

    def gathered(self, results: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """[out, dq, dk, dv] of the ranks, by global row, and the sum of their dsinks."""
        whole = [torch.full_like(like, torch.nan) for like in (self.q, self.q, self.k, self.k)]
        for rank, result in enumerate(results):
            for target, part in zip(whole, result[:4], strict=True):
                target[self.rows(rank)] = part.to(target)
        if self.sinks is not None:
            whole.append(torch.stack([result[4].to(self.sinks) for result in results]).sum(0))
        return whole

    def expected(self) -> list[Tensor]:
        """Dense softmax in float64 over each document's mask; gradients by autograd."""
        given = (self.q, self.k, self.v, *([] if self.sinks is None else [self.sinks]))
        leaves = [t.double().clone().requires_grad_() for t in given]
        q, k, v, *sinks = leaves
        group = q.shape[1] // k.shape[1]
        out = []
        for document, length in enumerate(self.plan.placement.lengths.tolist()):
            span = self.document(document)
            reach = int(self.plan.reach[document])
            position = torch.arange(length)
            behind = position[int(self.prefix[document]) :, None] - position[None, :]
            visible = (behind >= 0) & (behind < reach) if reach != FULL else behind > -length
            if reach > BAND:
                visible = behind.abs() <= reach - BAND
            if reach < 0:
                chunk = position // -reach
                visible = (behind >= 0) & (chunk[int(self.prefix[document]) :, None] == chunk)
            for number, start, stop in self.plan.to_json()["two_way"]:
                if number == document:
                    first = int(self.prefix[document])
                    visible[start - first : stop - first, start:stop] = True
                    if reach < length:  # the window still hides what is too far back
                        visible &= behind < reach
            rows = self.keys(document)
            keys, values = (t[rows].repeat_interleave(group, 1) for t in (k, v))
            scores = torch.einsum("nhd,mhd->hnm", q[span], keys) * SCALE
            if self.softcap:
                scores = self.softcap * torch.tanh(scores / self.softcap)
            scores = scores.masked_fill(~visible, -torch.inf)
            if sinks:  # one more key, without a value
                sink = sinks[0][:, None, None].expand(-1, scores.shape[1], 1)
                weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
            else:
                weights = scores.softmax(-1)
            out.append(torch.einsum("hnm,mhd->nhd", weights, values))
        whole = torch.cat(out)
        grads = torch.autograd.grad(whole, leaves, self.grad_out.double())
        return [whole.detach(), *grads]


def errors(found: Sequence[Tensor], exact: Sequence[Tensor]) -> dict[str, float]:
    """||found - exact|| / ||exact|| of each result; a NaN anywhere is infinite."""
    return {
        name: torch.nan_to_num(
            (ours.double() - right.double()).norm() / right.double().norm().clamp_min(1.0),
            nan=torch.inf,
        ).item()
        for name, ours, right in zip(NAMES[: len(exact)], found, exact, strict=True)
    }


def assert_exact(found: Sequence[Tensor], exact: Sequence[Tensor], dtype: torch.dtype) -> None:
    off = {name: error for name, error in errors(found, exact).items() if error > EXACT[dtype]}
    assert not off, f"off by {off}, allowed {EXACT[dtype]}"
