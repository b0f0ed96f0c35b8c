"""Kernel calls of a plan on one rank: how inputs are gathered, and where results go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

from distca.attention.backends.base import Attended, Gradients, Saved
from distca.attention.backends.packed import PackedCall
from distca.attention.keys_behind import Backward, Forward, PreparedKeysBehind
from distca.dispatch.layout import Call
from distca.dispatch.moves import Move, copies, sums
from distca.dispatch.rows import Places, Rows
from distca.dispatch.tensors import TensorSpec
from distca.dispatch.wire import ByteLayout, RowSpec, RowSpecs
from distca.planning.spans import Spans

_Rows = tuple[RowSpec, Rows]  # of one tensor


@dataclass(frozen=True, eq=False)
class PreparedCall:
    """One fused kernel call.

    scatter: brings the results of the kernel to own results and into what is sent home. Its
        memories are, in the forward pass, (out, lse, own out, own lse, sent); in the backward pass,
        (dq, dk, dv, sum of dk, sum of dv, own dq, sent).
    """

    packed: PackedCall
    gather: Gather
    scatter: Move
    behind: PreparedKeysBehind | None = None

    @classmethod
    def of(
        cls,
        call: Call,
        received: ByteLayout,
        home: ByteLayout,
        spec: TensorSpec,
        *,
        backward: bool,
        summed: Spans,
    ) -> PreparedCall:
        """received, home: the layouts of what peers sent, and of results that are sent home.

        summed: own keys that calls before this one read, and that have a sum already.
        """
        rows = RowSpecs.of(spec)
        q, out, lse = ((row, call.q) for row in (rows.q, rows.out, rows.lse))
        k, v = (rows.k, call.kv), (rows.v, call.kv)
        inputs = [q, k, v, out, lse, out] if backward else [q, k, v]
        if backward:
            scatter = _sums(call, home, spec, summed)
        else:
            scatter = _puts([out, lse], home, spec)
        return cls(
            packed=PackedCall.of(call.mask, call.q_offsets, call.kv_offsets, spec.device),
            gather=Gather(inputs, received, spec.device),
            scatter=scatter,
            behind=PreparedKeysBehind.of(call.behind, spec.device) if call.behind else None,
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, forward: Forward) -> Attended:
        """Returns the attention of packed queries. forward: of one kernel call."""
        if self.behind is None:
            return forward(q, k, v, self.packed)
        return self.behind.forward(q, k, v, self.packed, forward)

    def differentiate(self, grad_out: Tensor, saved: Saved, backward: Backward) -> Gradients:
        """Returns the gradients of packed queries and keys. backward: of one kernel call."""
        if self.behind is None:
            return backward(grad_out, saved, self.packed)
        return self.behind.backward(grad_out, saved, self.packed, backward)


class Gather:
    """Packs the rows of each input in one launch; the rows of a single run are a view.

    received: the layout of what peers sent.
    """

    def __init__(self, inputs: Sequence[_Rows], received: ByteLayout, device: torch.device) -> None:
        self._specs = [spec for spec, _ in inputs]
        buffer, packed = len(inputs), len(inputs) + 1  # memories after those of own tensors
        num_rows = [{0: len(rows)} if len(rows.runs) > 1 else {} for _, rows in inputs]
        layout = ByteLayout.of(self._specs, num_rows, 1)
        self._num_bytes = layout.num_bytes
        self._views: list[tuple[int, int, int]] = []  # of each input: memory, first, rows
        sources, targets = [], []
        for index, (spec, rows) in enumerate(inputs):
            starts = received.starts[index]
            if len(rows.runs) == 1:
                ((block, start, stop),) = rows.runs
                first = starts[block - 1] + start * spec.num_bytes if block else start
                self._views.append((buffer if block else index, int(first), stop - start))
                continue
            (first,) = layout.starts[index]
            sources.append(rows.places(spec.num_bytes, index, buffer, starts))
            targets.append(Places.packed(packed, int(first), sources[-1].size))
            self._views.append((packed, int(first), len(rows)))
        self._copy = copies(Places.joined(sources), Places.joined(targets), device)

    def __call__(self, own: Sequence[Tensor], received: Tensor | None = None) -> list[Tensor]:
        """Returns the rows of each input; ``received`` is not needed by local calls."""
        packed = own[0].new_empty(self._num_bytes, dtype=torch.uint8)
        memories = [*own, packed if received is None else received, packed]
        self._copy(memories)
        return [
            memories[memory][first : first + num_rows]
            if memory < len(own)
            else spec.view(memories[memory], first, num_rows)
            for spec, (memory, first, num_rows) in zip(self._specs, self._views, strict=True)
        ]


def _puts(results: Sequence[_Rows], home: ByteLayout, spec: TensorSpec) -> Move:
    """Returns the move of out and lse."""
    sources, targets = [], []
    for index, ((row, rows), starts) in enumerate(zip(results, home.starts, strict=True)):
        targets.append(rows.places(row.num_bytes, 2 + index, 4, starts))
        sources.append(Places.packed(index, 0, targets[-1].size))
    return copies(Places.joined(sources), Places.joined(targets), spec.device)


def _sums(call: Call, home: ByteLayout, spec: TensorSpec, summed: Spans) -> Move:
    """Returns the move of dq, dk and dv, which are added where tasks share a key.

    The first call that has a gradient of a key stores it, so that no sum has to begin with zeros.
    """
    specs, (keys, is_summed, _) = RowSpecs.of(spec), call.kv.split(summed)
    results = (
        (specs.q, call.q, 5, np.zeros(len(call.q.runs), np.bool_)),
        (specs.k, keys, 3, is_summed),
        (specs.v, keys, 4, is_summed),
    )
    values, targets, initial = [], [], []
    for index, (row, rows, own, before) in enumerate(results):
        starts = home.starts[index] // row.dtype.itemsize
        targets.append(rows.places(prod(row.shape), own, 6, starts))
        values.append(Places.packed(index, 0, targets[-1].size))
        initial.append(np.where(before, own, -1))
    joined = np.concatenate(initial)
    return sums(Places.joined(values), Places.joined(targets), joined, spec.dtype, spec.device)
