"""One rank's layout, ready for tensors of one shape, dtype and device.

Made once per plan and direction, used in every layer. Legend: T own token rows, H heads, G
key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from distca.attention.backends.base import Packed, wide
from distca.dispatch.exchange import Itinerary
from distca.dispatch.layout import Call, Exchange, Layout
from distca.dispatch.rows import Rows
from distca.dispatch.wire import Lane, Message
from distca.planning.plan import Plan
from distca.planning.spans import Ints, cumulative


@dataclass(frozen=True)
class TensorSpec:
    """What q [T, H, D], k and v [T, G, D] are like on every rank."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, q: Tensor, k: Tensor) -> TensorSpec:
        return cls(q.shape[1], k.shape[1], q.shape[2], q.dtype, q.device)

    def no_rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of a rank without tokens."""
        q = torch.empty(0, self.heads, self.head_dim, dtype=self.dtype, device=self.device)
        k = torch.empty(0, self.kv_heads, self.head_dim, dtype=self.dtype, device=self.device)
        return q, k, k


@dataclass(frozen=True, eq=False)
class RoutedCall:
    """One fused kernel call; rows are of own tensors and of what each peer sent."""

    packed: Packed
    q: Rows
    kv: Rows


@dataclass(frozen=True, eq=False)
class Route:
    """What one rank computes and exchanges in one direction of a layer."""

    local: tuple[RoutedCall, ...]
    remote: tuple[RoutedCall, ...]
    q_leaving: tuple[Rows, ...]  # by server that takes any
    kv_leaving: tuple[Rows, ...]
    itinerary: Itinerary
    at_home: RoutedCall | None  # the one call that takes and gives every row as it lies

    @classmethod
    def of(cls, plan: Plan, rank: int, kind: TensorSpec, *, backward: bool) -> Route:
        layout = Layout.of(plan, rank, backward=backward)
        own = layout.num_tokens
        local = tuple(_routed(call, [own], [own], kind.device) for call in layout.local)
        q_sizes, kv_sizes = ([own, *_nonzero(x.recv_splits)] for x in (layout.q, layout.kv))
        remote = tuple(_routed(call, q_sizes, kv_sizes, kind.device) for call in layout.remote)
        q_leaving, kv_leaving = _leaving(layout.q, own), _leaving(layout.kv, own)
        moves = layout.moves_queries or layout.moves_keys
        lanes = _lanes(layout, kind)
        if backward:  # servers kept nothing: what forward made travels too
            out, back = ["q", "kv", "kv", "q", "lse", "q"], ["q", "kv", "kv"]
            returns = moves
        else:
            out, back = ["q", "kv", "kv"], ["q", "lse"]
            returns = layout.moves_queries  # keys alone make nothing that goes home
        leaving = {"q": q_leaving, "kv": kv_leaving, "lse": q_leaving}
        itinerary = Itinerary(
            device=kind.device,
            out=Message(tuple(lanes[name] for name in out)) if moves else None,
            back=Message(tuple(lanes[name].returning() for name in back)) if returns else None,
            leaving=tuple(leaving[name] for name in out),
        )
        stays = len(local) == 1 and not (remote or q_leaving or kv_leaving)
        whole = stays and local[0].q.is_all_of(own) and local[0].kv.is_all_of(own)
        return cls(local, remote, q_leaving, kv_leaving, itinerary, local[0] if whole else None)


def _routed(
    call: Call, q_sizes: Sequence[int], kv_sizes: Sequence[int], device: torch.device
) -> RoutedCall:
    return RoutedCall(
        packed=Packed.of(call, device),
        q=Rows.of(call.q_rows, q_sizes),
        kv=Rows.of(call.kv_rows, kv_sizes),
    )


def _leaving(exchange: Exchange, num_tokens: int) -> tuple[Rows, ...]:
    offsets = cumulative(_nonzero(exchange.send_splits))
    return tuple(
        Rows.of(exchange.send_rows[start:stop], [num_tokens])
        for start, stop in pairwise(offsets.tolist())
    )


def _lanes(layout: Layout, kind: TensorSpec) -> dict[str, Lane]:
    q, kv = layout.q, layout.kv
    heads, kv_heads, size = kind.heads, kind.kv_heads, kind.head_dim
    return {
        "q": Lane.of((heads, size), kind.dtype, q.send_splits, q.recv_splits),
        "kv": Lane.of((kv_heads, size), kind.dtype, kv.send_splits, kv.recv_splits),
        "lse": Lane.of((heads,), wide(kind.dtype), q.send_splits, q.recv_splits),
    }


def _nonzero(splits: Ints) -> Ints:
    return splits[splits > 0]
