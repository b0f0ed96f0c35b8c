"""Tasks that are composed of parts which a simple kernel supports.

Legend: B tasks of one shape, n queries, m keys, H heads, G key/value heads, D head size of queries
and keys, V that of values and outputs.

[Note: parts] The kernels support full rectangles, causal squares, and a window with a dense mask.
- A full mask is one rectangle.
- A causal mask with m > n is the rectangle of keys before the position of the first query, which
  all queries see, and the causal square. The two outputs are merged by their log-sum-exps. In
  backward, each part with the *merged* out and lse gives exactly its share: its weights are
  exp(score - lse), and the term that couples the keys of a query enters only through
  sum(grad_out * out).
- A window is blocks of queries against the keys that any query of the block sees, with a dense mask
  [block, block + reach]; memory grows with the reach, not with the document.

Everything is computed in float32 (float64 for float64 inputs): 16-bit inputs are converted first,
since the CPU kernel is about a hundred times slower in bfloat16.
"""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import ClassVar

import torch
from torch import Tensor

from distca.attention.backends.base import Attended, Backend, Gradients, Saved, Scoring
from distca.attention.backends.packed import PackedCall
from distca.dispatch.tensors import wide
from distca.planning.masks import CAUSAL, FULL, Mask


@dataclass(frozen=True)
class Part:
    """Some queries of a task and some of its keys. [Note: parts]"""

    queries: slice
    keys: slice
    mask: Mask  # full, causal (a square), or a window, bottom-right aligned within the part


class PartsBackend(Backend):
    """Computes tasks part by part. Subclasses implement one part."""

    batch_keys: ClassVar[int]  # tasks are batched, to save kernel launches, up to this many keys

    @abstractmethod
    def _part_forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scoring: Scoring
    ) -> Attended:
        """q [B, n, H, D], k [B, m, G, D], v [B, m, G, V] -> out [B, n, H, V], lse [B, n, H]."""

    @abstractmethod
    def _part_backward(
        self, grad_out: Tensor, saved: Saved, mask: Mask, scoring: Scoring, deterministic: bool
    ) -> Gradients:
        """Returns the gradients of q [B, n, H, D], k [B, m, G, D] and v [B, m, G, V].

        out and lse may come from more keys than the part has.
        """

    def _parts(self, queries: int, keys: int, mask: Mask) -> Iterator[Part]:
        """Yields the parts of a task. Those that have queries in common have the same queries."""
        return parts(queries, keys, mask)

    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, call: PackedCall, scoring: Scoring
    ) -> Attended:
        result = Attended.empty(q, v)
        q, k, v = (x.to(wide(q.dtype)) for x in (q, k, v))
        for batch in _batches(call, self.batch_keys):
            out, lse, queries = map(batch.queries, (*result, q))
            keys, values = batch.keys(k), batch.keys(v)
            merged: dict[int, Attended] = {}
            for part in self._parts(batch.num_queries, batch.num_keys, call.mask):
                rows, columns = (slice(None), part.queries), (slice(None), part.keys)
                inputs = queries[rows], keys[columns], values[columns]
                here = self._part_forward(*inputs, part.mask, scoring)
                before = merged.get(part.queries.start)
                merged[part.queries.start] = here if before is None else before.merge(here)
            for start, block in merged.items():
                where = slice(start, start + block.lse.shape[1])
                out[:, where], lse[:, where] = block.out, block.lse
        return result

    def _backward(
        self,
        grad_out: Tensor,
        saved: Saved,
        call: PackedCall,
        scoring: Scoring,
        deterministic: bool,
    ) -> Gradients:
        dtype = saved.q.dtype
        grad_out, *tensors = (x.to(wide(dtype)) for x in (grad_out, *saved))
        total = Gradients(*map(torch.zeros_like, tensors[:3]))
        for batch in _batches(call, self.batch_keys):
            inputs = Saved(*tensors).map(batch.queries, batch.keys)
            grad, dq = batch.queries(grad_out), batch.queries(total.dq)
            dk, dv = batch.keys(total.dk), batch.keys(total.dv)
            for part in self._parts(batch.num_queries, batch.num_keys, call.mask):
                rows, columns = (slice(None), part.queries), (slice(None), part.keys)
                share = self._part_backward(
                    grad[rows],
                    inputs.map(itemgetter(rows), itemgetter(columns)),
                    part.mask,
                    scoring,
                    deterministic,
                )
                dq[rows].add_(share.dq)
                dk[columns].add_(share.dk)
                dv[columns].add_(share.dv)
        return Gradients(*(grad.to(dtype) for grad in total))


def parts(queries: int, keys: int, mask: Mask) -> Iterator[Part]:
    """Yields the parts of a task. [Note: parts]"""
    prefix = keys - queries
    if mask.reach == FULL or (queries == 1 and mask.reach >= keys):
        yield Part(slice(0, queries), slice(0, keys), Mask(FULL))
    elif mask.reach >= keys:
        if prefix:
            yield Part(slice(0, queries), slice(0, prefix), Mask(FULL))
        yield Part(slice(0, queries), slice(prefix, keys), Mask(CAUSAL))
    else:
        block = min(max(mask.reach, 64), 256)
        for start in range(0, queries, block):
            stop = min(start + block, queries)
            first = max(prefix + start - mask.reach + 1, 0)
            yield Part(slice(start, stop), slice(first, prefix + stop), mask)


@dataclass(frozen=True)
class _Batch:
    """Neighbouring tasks of one shape: a batch that is a view of the packed rows."""

    num_tasks: int  # B
    first_query: int
    first_key: int
    num_queries: int  # n
    num_keys: int  # m

    def queries(self, rows: Tensor) -> Tensor:
        """[Tq, ...] -> [B, n, ...]"""
        stop = self.first_query + self.num_tasks * self.num_queries
        return rows[self.first_query : stop].view(self.num_tasks, -1, *rows.shape[1:])

    def keys(self, rows: Tensor) -> Tensor:
        """[Tk, ...] -> [B, m, ...]"""
        stop = self.first_key + self.num_tasks * self.num_keys
        return rows[self.first_key : stop].view(self.num_tasks, -1, *rows.shape[1:])


def _batches(call: PackedCall, max_keys: int) -> Iterator[_Batch]:
    """Yields tasks in order, without tasks that have no query: the CPU kernel divides by zero."""
    task = 0
    for (queries, keys), same in groupby(call.lengths):
        left = len(list(same))
        while left:
            size = min(left, max(max_keys // max(keys, 1), 1))
            if queries:
                yield _Batch(size, call.q_bounds[task], call.kv_bounds[task], queries, keys)
            task, left = task + size, left - size
