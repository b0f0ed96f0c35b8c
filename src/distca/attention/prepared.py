"""A plan on one rank, ready for tensors of one shape, dtype and device.

Made once per plan and used in every layer. Legend: T own token rows, H heads, G key/value heads, D
head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distca.attention.backends.base import Backend, PackedCall, wide
from distca.dispatch.buffers import Buffers
from distca.dispatch.exchange import Exchange
from distca.dispatch.layout import Call, Layout, PeerRows
from distca.dispatch.meter import Meter
from distca.dispatch.transports.base import Transport
from distca.dispatch.wire import ByteLayout, Message, RowSpec
from distca.planning.plan import Plan


@dataclass(frozen=True)
class TensorSpec:
    """The sizes, dtype and device of q [T, H, D] and of k and v [T, G, D] on every rank."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, q: Tensor, k: Tensor) -> TensorSpec:
        return cls(q.shape[1], k.shape[1], q.shape[2], q.dtype, q.device)

    def empty(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns q, k and v of a rank without tokens."""
        q = torch.empty(0, self.heads, self.head_dim, dtype=self.dtype, device=self.device)
        k = torch.empty(0, self.kv_heads, self.head_dim, dtype=self.dtype, device=self.device)
        return q, k, k


@dataclass(frozen=True, eq=False)
class PreparedLayout:
    """One direction of a plan on one rank: its calls on the device, and its two messages."""

    layout: Layout
    local: tuple[tuple[Call, PackedCall], ...]
    remote: tuple[tuple[Call, PackedCall], ...]
    dispatch: Message
    combine: Message

    @classmethod
    def of(cls, plan: Plan, rank: int, spec: TensorSpec, *, backward: bool) -> PreparedLayout:
        layout = Layout.of(plan, rank, backward=backward)
        q = RowSpec((spec.heads, spec.head_dim), spec.dtype), layout.q
        kv = RowSpec((spec.kv_heads, spec.head_dim), spec.dtype), layout.kv
        lse = RowSpec((spec.heads,), wide(spec.dtype)), layout.q
        if backward:  # q, k, v, out, lse and grad_out, since servers keep nothing; dq, dk and dv
            out, back = [q, kv, kv, q, lse, q], [q, kv, kv]
        else:  # q, k and v; out and lse
            out, back = [q, kv, kv], [q, lse]
        return cls(
            layout=layout,
            local=tuple((call, _packed(call, spec.device)) for call in layout.local),
            remote=tuple((call, _packed(call, spec.device)) for call in layout.remote),
            dispatch=_message(out, layout.num_ranks),
            combine=_message(back, layout.num_ranks, homeward=True),
        )


@dataclass(frozen=True, eq=False)
class PreparedPlan:
    """A plan on one rank, ready to run layer after layer; None for a direction that is not used."""

    forward: PreparedLayout | None
    backward: PreparedLayout | None
    spec: TensorSpec
    backend: Backend
    scale: float
    deterministic: bool
    transport: Transport
    buffers: Buffers
    meter: Meter  # spans "attention" and "exposed", the communication that no computation hides

    def exchange(self, prepared: PreparedLayout) -> Exchange:
        """Returns the exchange of one layer, which holds the buffers from now on."""
        messages = prepared.dispatch, prepared.combine
        return Exchange(messages, self.spec.device, self.transport, self.buffers, self.meter)


def _packed(call: Call, device: torch.device) -> PackedCall:
    return PackedCall.of(call.mask, call.q_offsets, call.kv_offsets, device)


def _message(
    tensors: Sequence[tuple[RowSpec, PeerRows]], num_ranks: int, *, homeward: bool = False
) -> Message:
    """homeward: servers send as many rows as they received."""
    specs = [spec for spec, _ in tensors]
    peer_rows = [peers for _, peers in tensors]
    send = [{rank: len(rows) for rank, rows in each.send.items()} for each in peer_rows]
    recv = [each.recv for each in peer_rows]
    there, back = (ByteLayout.of(specs, num_rows, num_ranks) for num_rows in (send, recv))
    moves = any(each.moves for each in peer_rows)
    return Message(back, there, moves) if homeward else Message(there, back, moves)
