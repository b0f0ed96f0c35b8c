"""How the tensors of a message lie in its byte buffers.

All tensors of a message share one buffer and one uneven all-to-all: for each rank first its rows of
tensor 0, then of tensor 1, and so on. Each part starts at a boundary that suits every dtype and
kernel. This is the only place where bytes are laid out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from distca.dispatch.layout import Layout, PeerRows
from distca.dispatch.tensors import TensorSpec, wide

ALIGNMENT = 128  # bytes

Parts = list[list[Tensor]]  # [tensors][ranks with rows]: [rows, *shape], inside the buffer


class RowSpec(NamedTuple):
    """The shape and the dtype of one row of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class _RankRows(NamedTuple):
    tensor: int
    start: int  # in bytes
    stop: int
    num_rows: int


@dataclass(frozen=True, eq=False)
class ByteLayout:
    """Where the rows of each tensor and rank lie in a buffer that is sent, or received."""

    tensors: tuple[RowSpec, ...]
    rank_bytes: tuple[int, ...]  # [ranks]: the split sizes of the all-to-all
    parts: tuple[_RankRows, ...]

    @classmethod
    def of(
        cls, tensors: Sequence[RowSpec], num_rows: Sequence[Mapping[int, int]], num_ranks: int
    ) -> ByteLayout:
        """num_rows: the rows of each tensor by rank; ranks without rows are left out."""
        rank_bytes, parts, offset = [0] * num_ranks, [], 0
        for rank in sorted({rank for counts in num_rows for rank in counts}):
            first = offset
            for index, (tensor, counts) in enumerate(zip(tensors, num_rows, strict=True)):
                if count := counts.get(rank, 0):
                    size = count * prod(tensor.shape) * tensor.dtype.itemsize
                    parts.append(_RankRows(index, offset, offset + size, count))
                    offset += -(-size // ALIGNMENT) * ALIGNMENT
            rank_bytes[rank] = offset - first
        return cls(tuple(tensors), tuple(rank_bytes), tuple(parts))

    @cached_property
    def num_bytes(self) -> int:
        return sum(self.rank_bytes)

    def views(self, buffer: Tensor) -> Parts:
        """Returns, for each tensor, the rows of those ranks that have any, without a copy."""
        views: Parts = [[] for _ in self.tensors]
        for index, start, stop, num_rows in self.parts:
            shape, dtype = self.tensors[index]
            views[index].append(buffer[start:stop].view(dtype).view(num_rows, *shape))
        return views


@dataclass(frozen=True, eq=False)
class Message:
    """One uneven all-to-all, as one rank sees it."""

    peer_rows: tuple[PeerRows, ...]  # of each tensor
    send: ByteLayout
    recv: ByteLayout

    @property
    def moves(self) -> bool:
        """Whether any rank sends anything; otherwise no rank joins the collective."""
        return any(rows.moves for rows in self.peer_rows)


class Messages(NamedTuple):
    """The two messages of an exchange."""

    dispatch: Message
    combine: Message

    @classmethod
    def of(cls, layout: Layout, spec: TensorSpec, *, backward: bool) -> Messages:
        q = RowSpec((spec.heads, spec.head_dim), spec.dtype), layout.q
        kv = RowSpec((spec.kv_heads, spec.head_dim), spec.dtype), layout.kv
        lse = RowSpec((spec.heads,), wide(spec.dtype)), layout.q
        if backward:  # q, k, v, out, lse and grad_out, since servers keep nothing; dq, dk and dv
            out, back = [q, kv, kv, q, lse, q], [q, kv, kv]
        else:  # q, k and v; out and lse
            out, back = [q, kv, kv], [q, lse]
        # Servers send as many rows home as they received.
        return cls(_message(out, layout), _message(back, layout, homeward=True))


def _message(
    tensors: Sequence[tuple[RowSpec, PeerRows]], layout: Layout, *, homeward: bool = False
) -> Message:
    specs, peer_rows = zip(*tensors, strict=True)
    sent = [{rank: len(rows) for rank, rows in each.send.items()} for each in peer_rows]
    received = [each.recv for each in peer_rows]
    away, back = (ByteLayout.of(specs, counts, layout.num_ranks) for counts in (sent, received))
    return Message(peer_rows, back, away) if homeward else Message(peer_rows, away, back)
