"""torch's built-in kernels: the fast path on a CPU, and on CUDA what works where flash does not.

Legend: B tasks of one shape, n queries, m keys, H heads, G key/value heads, D head size.

The kernels know rectangles that are seen whole and squares that are causal; [Note: parts] says how
a task is made of those. Everything is computed in float32 (float64 in float64): 16-bit inputs are
widened first, since in bfloat16 the CPU kernel is some hundred times slower.

[Note: parts]
- full: one rectangle.
- causal with m > n: the rectangle of keys before the first query's own, seen whole, and the causal
  square. The two outputs are merged by their log-sum-exps. Backward, each part alone with the
  *merged* out and lse gives exactly its share: its weights are exp(score - lse), and the term that
  couples a query's keys enters only through sum(grad_out * out).
- window: blocks of queries against the keys that any of them sees, with a dense mask [block, block
  + reach]; memory grows with the reach, not with the document.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from distca.attention.backends.base import (
    Attended,
    Backend,
    Gradients,
    Packed,
    Traits,
    grouping_refusal,
    wide,
)
from distca.attention.backends.sdpa_kernels import part_backward, part_forward
from distca.planning.masks import CAUSAL, FULL, Mask

_BATCH_KEYS = 1 << 14  # tasks are batched to spare launches; past this there is nothing to spare


class Sdpa(Backend):
    """The CPU's flash kernel; on CUDA the memory-efficient one, task shape by task shape."""

    name = "sdpa"

    def refusal(self, traits: Traits) -> str | None:
        dtypes = [torch.float32, torch.bfloat16, torch.float16]
        if traits.device == "cpu":
            dtypes.append(torch.float64)
        elif traits.device != "cuda":
            return f"it has kernels for cpu and cuda, not for {traits.device}."
        elif traits.head_dim % 4:
            return f"on cuda the head size must be a multiple of 4, not {traits.head_dim}."
        if traits.dtype not in dtypes:
            return f"on {traits.device} it takes {_names(dtypes)}, not {_names([traits.dtype])}."
        return grouping_refusal(traits)

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, packed: Packed, scale: float) -> Attended:
        result = Attended(torch.empty_like(q), q.new_empty(q.shape[:2], dtype=wide(q.dtype)))
        q, k, v = (x.to(wide(q.dtype)) for x in (q, k, v))
        for run in _runs(packed):
            out, lse, queries = (run.queries_of(x) for x in (*result, q))
            keys, values = run.keys_of(k), run.keys_of(v)
            merged: dict[int, Attended] = {}
            for part in _parts(run.num_queries, run.num_keys, packed.mask):
                here = part_forward(
                    queries[:, part.queries],
                    keys[:, part.keys],
                    values[:, part.keys],
                    part.mask,
                    scale,
                )
                before = merged.get(part.queries.start)
                merged[part.queries.start] = here if before is None else _merge(before, here)
            for start, block in merged.items():
                rows = slice(start, start + block.lse.shape[1])
                out[:, rows], lse[:, rows] = block.out, block.lse
        return result

    def _backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        packed: Packed,
        scale: float,
        deterministic: bool,
    ) -> Gradients:
        dtype = q.dtype
        grad_out, q, k, v, out = (x.to(wide(dtype)) for x in (grad_out, q, k, v, out))
        total = Gradients(torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v))
        for run in _runs(packed):
            by_query = [run.queries_of(x) for x in (grad_out, q, out, lse, total.dq)]
            by_key = [run.keys_of(x) for x in (k, v, total.dk, total.dv)]
            for part in _parts(run.num_queries, run.num_keys, packed.mask):
                part_grad, part_q, part_out, part_lse, dq = (x[:, part.queries] for x in by_query)
                part_k, part_v, dk, dv = (x[:, part.keys] for x in by_key)
                share = part_backward(
                    part_grad,
                    part_q,
                    part_k,
                    part_v,
                    part_out,
                    part_lse,
                    part.mask,
                    scale,
                    deterministic,
                )
                dq += share.dq
                dk += share.dk
                dv += share.dv
        return Gradients(total.dq.to(dtype), total.dk.to(dtype), total.dv.to(dtype))


@dataclass(frozen=True)
class _Run:
    """Neighbouring tasks of one shape: a batch that is a view of the packed rows."""

    num_tasks: int  # B
    first_query: int
    first_key: int
    num_queries: int  # n
    num_keys: int  # m

    def queries_of(self, rows: Tensor) -> Tensor:
        """[Tq, ...] -> [B, n, ...]"""
        stop = self.first_query + self.num_tasks * self.num_queries
        return rows[self.first_query : stop].view(self.num_tasks, -1, *rows.shape[1:])

    def keys_of(self, rows: Tensor) -> Tensor:
        """[Tk, ...] -> [B, m, ...]"""
        stop = self.first_key + self.num_tasks * self.num_keys
        return rows[self.first_key : stop].view(self.num_tasks, -1, *rows.shape[1:])


def _runs(packed: Packed) -> Iterator[_Run]:
    """Tasks in order, those without queries left out: the CPU kernel would divide by zero."""
    task = 0
    for (queries, keys), same in groupby(packed.lengths):
        left = len(list(same))
        while left:
            size = min(left, max(_BATCH_KEYS // max(keys, 1), 1))
            if queries:
                yield _Run(size, packed.q_bounds[task], packed.kv_bounds[task], queries, keys)
            task, left = task + size, left - size


@dataclass(frozen=True)
class _Part:
    """Some queries of a task against some of its keys, see [Note: parts]."""

    queries: slice
    keys: slice
    mask: Mask  # full, causal (a square), or a window, bottom-right aligned within the part


def _parts(queries: int, keys: int, mask: Mask) -> Iterator[_Part]:
    prefix = keys - queries
    if mask.reach == FULL or (queries == 1 and mask.reach >= keys):
        yield _Part(slice(0, queries), slice(0, keys), Mask(FULL))
    elif mask.reach >= keys:
        if prefix:
            yield _Part(slice(0, queries), slice(0, prefix), Mask(FULL))
        yield _Part(slice(0, queries), slice(prefix, keys), Mask(CAUSAL))
    else:
        block = min(max(mask.reach, 64), 256)
        for start in range(0, queries, block):
            stop = min(start + block, queries)
            first = max(prefix + start - mask.reach + 1, 0)
            yield _Part(slice(start, stop), slice(first, prefix + stop), mask)


def _merge(a: Attended, b: Attended) -> Attended:
    """Attention to the keys of both, from attention to either."""
    lse = torch.logaddexp(a.lse, b.lse)
    share_a, share_b = (a.lse - lse).exp_()[..., None], (b.lse - lse).exp_()[..., None]
    return Attended(a.out * share_a + b.out * share_b, lse)


def _names(dtypes: list[torch.dtype]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
