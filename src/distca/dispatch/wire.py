"""How the tensors of a message lie in its byte buffers.

All tensors of a message share one buffer and one uneven all-to-all: for each rank first its rows of
tensor 0, then of tensor 1, and so on. Each part starts at a boundary that suits every dtype and
kernel. This is the only place where bytes are laid out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import chain
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from distca.dispatch.layout import Layout, PeerRows
from distca.dispatch.moves import Move, copies, sums
from distca.dispatch.rows import Places, Rows
from distca.dispatch.tensors import TensorSpec, wide
from distca.planning.spans import Bools, Ints, Spans, as_ints, cumulative

ALIGNMENT = 128  # bytes


class RowSpec(NamedTuple):
    """The shape and the dtype of one row of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def view(self, buffer: Tensor, start: int, num_rows: int) -> Tensor:
        """Returns rows that lie in a byte buffer, without a copy."""
        part = buffer[start : start + num_rows * self.num_bytes]
        return part.view(self.dtype).view(num_rows, *self.shape)


@dataclass(frozen=True, eq=False)
class ByteLayout:
    """Where the rows of each tensor and rank lie in a buffer that is sent, or received."""

    rank_bytes: tuple[int, ...]  # [ranks]: the split sizes of the all-to-all
    starts: tuple[Ints, ...]  # [tensors][ranks with rows]: the first byte

    @classmethod
    def of(
        cls, tensors: Sequence[RowSpec], num_rows: Sequence[Mapping[int, int]], num_ranks: int
    ) -> ByteLayout:
        """num_rows: the rows of each tensor by rank; ranks without rows are left out."""
        rank_bytes, offset = [0] * num_ranks, 0
        starts: list[list[int]] = [[] for _ in tensors]
        for rank in sorted({rank for counts in num_rows for rank in counts}):
            first = offset
            for index, (tensor, counts) in enumerate(zip(tensors, num_rows, strict=True)):
                if count := counts.get(rank, 0):
                    starts[index].append(offset)
                    offset += -(-count * tensor.num_bytes // ALIGNMENT) * ALIGNMENT
            rank_bytes[rank] = offset - first
        return cls(tuple(rank_bytes), tuple(map(as_ints, starts)))

    @cached_property
    def num_bytes(self) -> int:
        return sum(self.rank_bytes)


@dataclass(frozen=True, eq=False)
class Message:
    """One uneven all-to-all, as one rank sees it.

    move: gathers what is sent in a dispatch, with the memories (*tensors, sent); brings home what
        was received in a combine, with (out, lse, received) in the forward pass, and in the
        backward pass with (received, -, -, sum of dk, sum of dv, dq, dk, dv).
    """

    send: ByteLayout
    recv: ByteLayout
    moves: bool  # whether any rank sends anything; otherwise no rank joins the collective
    move: Move


class RowSpecs(NamedTuple):
    """The rows of one query and of one key, as they travel, for tensors of one kind.

    Those of a latent and of a rotary part replace k and v where latents travel.
    """

    q: RowSpec
    k: RowSpec
    v: RowSpec
    out: RowSpec
    lse: RowSpec

    @classmethod
    def of(cls, spec: TensorSpec) -> RowSpecs:
        keys: list[tuple[int, ...]] = [(spec.latent_dim,), (spec.rope_dim,)]
        if not spec.latent_dim:
            keys = [(spec.kv_heads, size) for size in (spec.head_dim, spec.v_head_dim)]
        k, v = (RowSpec(size, spec.dtype) for size in keys)
        q, out = (RowSpec((spec.heads, d), spec.dtype) for d in (spec.head_dim, spec.v_head_dim))
        return cls(q, k, v, out, RowSpec((spec.heads,), wide(spec.dtype)))


class Messages(NamedTuple):
    """The two messages of an exchange."""

    dispatch: Message
    combine: Message

    @classmethod
    def of(cls, layout: Layout, spec: TensorSpec, *, backward: bool) -> Messages:
        rows = RowSpecs.of(spec)
        q, o, lse = ((row, layout.q) for row in (rows.q, rows.out, rows.lse))
        k, v = (rows.k, layout.kv), (rows.v, layout.kv)
        matrix = [(RowSpec(spec.expansion, spec.dtype), layout.matrix)] if spec.latent_dim else []
        if backward:  # q, k, v, out, lse and grad_out, since servers keep nothing; dq, dk and dv
            out, back = [q, k, v, o, lse, o, *matrix], [q, k, v, *matrix]
        else:  # q, k and v; out and lse
            out, back = [q, k, v, *matrix], [o, lse]
        away, here = _sides(out, layout.num_ranks)
        own, buffer = _places(out, away)
        dispatch = Message(away, here, _moves(out), copies(own, buffer, spec.device))
        # Servers send as many rows home as they received.
        away, here = _sides(back, layout.num_ranks)
        if backward:
            # Own tasks have sums for keys, but none for latents.
            summed = layout.read_before[0 if spec.latent_dim else -1]
            move = sums_at_home(back[:3], away, layout.num_tokens, summed, spec)
        else:
            own, buffer = _places(back, away)
            move = copies(buffer, own, spec.device)
        return cls(dispatch, Message(here, away, _moves(back), move))


Traveling = Sequence[tuple[RowSpec, PeerRows]]  # the tensors of a message


def _moves(tensors: Traveling) -> bool:
    return any(rows.moves for _, rows in tensors)


def _sides(tensors: Traveling, num_ranks: int) -> tuple[ByteLayout, ByteLayout]:
    """Returns the layouts of own rows that are away, and of the rows of peers that are here."""
    specs = [spec for spec, _ in tensors]
    sent = [{rank: len(rows) for rank, rows in each.send.items()} for _, each in tensors]
    received = [each.recv for _, each in tensors]
    away, here = (ByteLayout.of(specs, counts, num_ranks) for counts in (sent, received))
    return away, here


def _joined(parts: Collection[Rows]) -> tuple[Rows, Ints]:
    """Returns the rows of all parts in order, and the number of runs of each."""
    runs = chain.from_iterable(rows.runs for rows in parts)
    return Rows(tuple(runs)), as_ints([len(rows.runs) for rows in parts])


def _sent(peers: PeerRows, summed: Spans) -> tuple[Rows, Bools, Ints]:
    """Returns the rows that are sent, which runs have a sum, and how many runs each rank gets."""
    rows, count = _joined(peers.send.values())
    rows, is_summed, run = rows.split(summed)
    return rows, is_summed, np.add.reduceat(np.bincount(run), cumulative(count)[:-1])


def _places(tensors: Traveling, away: ByteLayout) -> tuple[Places, Places]:
    """Returns, in bytes, where own rows lie in the tensors and in the buffer."""
    own, buffer = [], []
    for index, ((spec, peers), starts) in enumerate(zip(tensors, away.starts, strict=True)):
        if not peers.send:
            continue
        rows, count = _joined(peers.send.values())
        own.append(rows.places(spec.num_bytes, index))
        buffer.append(Places.parts(len(tensors), starts, own[-1].size, count))
    return Places.joined(own), Places.joined(buffer)


def sums_at_home(
    tensors: Traveling, away: ByteLayout, num_tokens: int, summed: Spans, spec: TensorSpec
) -> Move:
    """Returns the move that copies dq, and adds to the sums of dk and dv in the order of ranks.

    summed: own rows that have a sum; the sums of other rows have not been written.
    """
    sent = cache(partial(_sent, summed=summed))  # the same of k and v
    everything, all_summed, _ = Rows.first(num_tokens).split(summed)
    values, targets, initial = [], [], []
    for index, ((row, peers), starts) in enumerate(zip(tensors, away.starts, strict=False)):
        width, sums_of = prod(row.shape), (-1, 3, 4)[index]
        if peers.send:
            rows, is_summed, count = sent(peers)
            targets.append(rows.places(width, 5 + index))
            values.append(Places.parts(0, starts // row.dtype.itemsize, targets[-1].size, count))
            initial.append(np.where(is_summed, sums_of, -1))
        if index:  # rows of which no server sends anything
            targets.append(everything.places(width, 5 + index))
            values.append(Places.packed(-1, 0, targets[-1].size))
            initial.append(np.where(all_summed, sums_of, -1))
    joined = np.concatenate(initial)
    return sums(Places.joined(values), Places.joined(targets), joined, spec.dtype, spec.device)
