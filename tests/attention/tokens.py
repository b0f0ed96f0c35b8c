"""Random tensors of a plan's documents, and the results of one device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from distca.dispatch.latent import Latent
from distca.planning.masks import BAND, FULL
from distca.planning.plan import Plan

SCALE = 0.3
EXACT = {torch.float64: 1e-10, torch.float32: 1e-5}
NAMES = ("out", "dq", "dk or dlatent", "dv or drotary", "dsinks or dweight", "dweight")
Heads = tuple[int, ...]  # query heads, key/value heads, head size, and that of values if it differs
GROUPED: Heads = (4, 2, 8)
LATENT = (5, 3)  # the sizes of latents and of rotary parts


class Tokens:
    """Random q, k, v and grad_out of every document, and where each rank's rows come from.

    sinks: whether there are random sinks too; then their gradient is the last of all results.
    softcap: of the scores; 0 does not cap them.
    latent: the sizes of latents and of rotary parts, if k and v are made of random ones. Then the
        gradients of these replace those of k and v, and that of the matrix is the last result.
    """

    def __init__(
        self,
        plan: Plan,
        dtype: torch.dtype,
        heads: Heads = GROUPED,
        *,
        sinks: bool = False,
        softcap: float = 0.0,
        latent: tuple[int, int] | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        self.plan = plan
        placement = plan.placement
        self.prefix = placement.prefixes.length
        self.first = np.concatenate([[0], np.cumsum(placement.lengths - self.prefix)])
        total = int(self.first[-1])
        query_heads, kv_heads, size, *other = heads
        value_size = other[0] if other else size

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype)

        self.q, self.k = draw(total, query_heads, size), draw(total, kv_heads, size)
        self.v = draw(total, kv_heads, value_size)
        self.grad_out = draw(total, query_heads, value_size)
        self.latent = None
        if latent is not None:
            rank, rotary = latent
            weight = draw(kv_heads * (size - rotary + value_size), rank)
            self.latent = Latent(draw(total, rank), draw(total, rotary), weight)
            self.k, self.v = expand(self.latent, kv_heads, size)
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

    @property
    def factors(self) -> list[Tensor]:
        """What keys and values are made of, by row: latents and rotary parts, or themselves."""
        return [self.k, self.v] if self.latent is None else list(self.latent[:2])

    @property
    def shared(self) -> list[Tensor]:
        """What all ranks have: sinks, and the matrix that expands latents."""
        weight = None if self.latent is None else self.latent.weight
        return [each for each in (self.sinks, weight) if each is not None]

    def gathered(self, results: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """[out, dq, dk, dv] of the ranks, by global row, and the sums of gradients of the rest."""
        whole = [
            torch.full_like(each, torch.nan) for each in (self.grad_out, self.q, *self.factors)
        ]
        for rank, result in enumerate(results):
            for target, part in zip(whole, result[:4], strict=True):
                target[self.rows(rank)] = part.to(target)
        sums = zip(*(result[4:] for result in results), strict=True)
        return whole + [torch.stack([part.cpu() for part in parts]).sum(0) for parts in sums]

    def expected(self) -> list[Tensor]:
        """Dense softmax in float64 over each document's mask; gradients by autograd."""
        given = (self.q, *self.factors, *self.shared)
        leaves = [t.double().clone().requires_grad_() for t in given]
        q, k, v, *sinks = leaves
        if self.latent is not None:
            k, v = expand(Latent(k, v, sinks.pop()), self.k.shape[1], q.shape[2])
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


def expand(latent: Latent, kv_heads: int, size: int) -> tuple[Tensor, Tensor]:
    """k and v, head by head: the rotary part is last in a key."""
    c, rotary, weight = latent
    plain, keys, values = size - rotary.shape[1], [], []
    for rows in weight.chunk(kv_heads):
        keys.append(torch.cat([c @ rows[:plain].t(), rotary], 1))
        values.append(c @ rows[plain:].t())
    return torch.stack(keys, 1), torch.stack(values, 1)


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
