"""How many kernels a layer launches of our own, besides those of attention itself.

A move counts as one launch, as it is on a GPU; here, slices do its work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import distca
from distca.attention.backends.base import Saved
from distca.attention.core import CoreAttention
from distca.attention.passes import BackwardPass, ForwardPass
from distca.dispatch import slices
from distca.dispatch.layout import Layout
from distca.dispatch.tensors import TensorSpec
from distca.dispatch.transports.base import Wait
from distca.dispatch.transports.throttled import ThrottledTransport
from distca.planning.plan import Plan

MOST = 6  # of an exchange: ping-pong has two in a layer
NOT_DENSE = 4  # more where q, k, v and the gradient of the output are not contiguous
RANKS, HEADS = 10, (4, 1, 8)


def plan_of_many_pieces() -> Plan:
    """Each document is cut for all ranks; half of them are slow, and give tasks to the others."""
    sizes = dict(zip(("heads", "kv_heads", "head_dim"), HEADS, strict=True)) | {"cost": "pairs"}
    placement = distca.place(
        [320, 800, 1600, 400] * 4, RANKS, placer="per-document", cp=RANKS, **sizes
    )
    speed = [1] * (RANKS // 2) + [3] * (RANKS // 2)
    return distca.plan(placement, tile=16, min_shard=16, search_orders=1, speed=speed, **sizes)


class Launches(TorchDispatchMode):
    """Counts operations that neither allocate nor return a view."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and not func._opname.startswith(("empty", "new_empty")):
            self.counts[func._opname] += 1
        return func(*args, **(kwargs or {}))


class Uncounted:
    """A backend that launches nothing, since what it computes does not matter."""

    def forward(self, q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        with _disable_current_modes():
            return torch.zeros_like(q), torch.zeros(q.shape[:2])

    def backward(self, grad_out: Tensor, saved: Saved, *_: Any) -> tuple[Tensor, ...]:
        with _disable_current_modes():
            return tuple(torch.zeros_like(each) for each in (saved.q, saved.k, saved.v))


class Instantaneous(ThrottledTransport):
    def start(self, *_: Any) -> Wait:
        return lambda: None


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The moves that run, each of which is one launch."""
    moves: Counter[str] = Counter()
    for kind in (slices.Copies, slices.Sums):

        def counted(move: Any, memories: Sequence[Tensor], run: Any = kind.__call__) -> None:
            moves[type(move).__name__] += 1
            with _disable_current_modes():
                run(move, memories)

        monkeypatch.setattr(kind, "__call__", counted)
    return moves


@pytest.mark.parametrize("dense", [True, False], ids=["dense", "parts of one projection"])
def test_a_plan_of_hundreds_of_pieces_takes_six_launches(
    launches: Counter[str], dense: bool
) -> None:
    plan = plan_of_many_pieces()
    tokens = int(plan.placement.tokens[0])
    heads, kv_heads, size = HEADS
    qkv = torch.zeros(tokens, heads + 2 * kv_heads, size, dtype=torch.bfloat16)
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
    if dense:
        q, k, v = (each.contiguous() for each in (q, k, v))
    attention = CoreAttention(transport=Instantaneous(0, RANKS, 1e9), backend="reference")
    prepared = attention.prepare(
        TensorSpec.of(q, k, v), forward=plan, backward=plan, announce=False
    )
    prepared = replace(prepared, backend=Uncounted())  # type: ignore[arg-type]
    assert num_runs(Layout.of(plan, 0)) > 400
    with Launches() as forward:
        attended = ForwardPass(prepared, q, k, v).combine()
    most = MOST if dense else MOST + NOT_DENSE
    assert sum((forward.counts + launches).values()) <= most, (forward.counts, launches)
    launches.clear()
    grad_out = torch.zeros(heads, tokens, size, dtype=q.dtype).transpose(0, 1)
    if dense:
        grad_out = grad_out.contiguous()
    with Launches() as backward:
        BackwardPass(prepared, grad_out, Saved(q, k, v, *attended)).combine()
    assert sum((backward.counts + launches).values()) <= most, (backward.counts, launches)


def num_runs(layout: Layout) -> int:
    calls, peers = (*layout.local, *layout.remote), (layout.q, layout.kv)
    assert all((layout.local, layout.remote, layout.q.send, layout.kv.send))
    rows = [rows for call in calls for rows in (call.q, call.kv)]
    return sum(len(each.runs) for each in (*rows, *(r for p in peers for r in p.send.values())))
