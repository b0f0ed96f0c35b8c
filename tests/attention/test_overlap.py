"""Dispatch, compute, combine: two halves take turns, and each hides the other's exchanges."""

from __future__ import annotations

import weakref

import pytest
import torch
from attention.tokens import SCALE, Tokens, assert_exact
from recorded import RecordedAttention, exposed
from strategies import Batch
from torch import Tensor

import distca
from distca.attention.core import CoreAttention
from distca.dispatch.transports.local import LocalTransport, LocalWorld
from distca.planning.plan import Plan

pytestmark = pytest.mark.usefixtures("poisoned_memory")

LAYERS = 3
OPTIONS = {"scale": SCALE, "backend": "reference"}
GRAIN = {"tile": 16, "min_shard": 16, "cost": "pairs"}
HALVES = {"ping": [[201], [64, 7, 1]], "pong": [[33, 5], [180]]}


class Seam(torch.autograd.Function):
    """Computation of one half between two attentions; records an event in both directions."""

    @staticmethod
    def forward(ctx, x: Tensor, half: str, events: list[tuple[str, str]]) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.half, ctx.events = half, events
        events.append(("compute", half))
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[no-untyped-def]
        ctx.events.append(("compute", ctx.half))
        return grad.clone(), None, None


def train_step(
    transport: LocalTransport, plans: dict[str, Plan], tokens: dict[str, Tokens]
) -> tuple[dict[str, list[Tensor]], list[tuple[str, str]], list[tuple[str, str]]]:
    """Returns [out, dq, dk, dv] by half, and the events of forward and of backward."""
    events: list[tuple[str, str]] = []
    attention = {half: RecordedAttention(transport, half, events, **OPTIONS) for half in plans}
    leaves = {
        half: [t.requires_grad_() for t in tokens[half].of_rank(transport.rank)[:3]]
        for half in plans
    }
    x = {half: qkv[0] for half, qkv in leaves.items()}
    pending = {half: attention[half].dispatch(*leaves[half], plans[half]) for half in plans}
    for layer in range(LAYERS):
        for one in pending.values():
            one.compute()
        for half, one in list(pending.items()):
            x[half] = Seam.apply(one.combine(), half, events)
            if layer + 1 < LAYERS:
                q, k, v = x[half], *leaves[half][1:]
                pending[half] = attention[half].dispatch(q, k, v, plans[half])
    forward, events[:] = list(events), []
    losses = [(x[half] * tokens[half].of_rank(transport.rank)[3]).sum() for half in plans]
    torch.stack(losses).sum().backward()
    results = {
        half: [x[half].detach(), *(t.grad for t in qkv if t.grad is not None)]
        for half, qkv in leaves.items()
    }
    return results, forward, events


@pytest.fixture(scope="module")
def step():  # type: ignore[no-untyped-def]
    plans = {half: Batch(ranks, GRAIN).plan() for half, ranks in HALVES.items()}
    assert all(len(plan.forward.moved) for plan in plans.values())
    tokens = {half: Tokens(plan, torch.float64) for half, plan in plans.items()}
    return tokens, LocalWorld(2).run(lambda transport: train_step(transport, plans, tokens))


def test_every_exchange_but_first_and_last_is_hidden(step) -> None:  # type: ignore[no-untyped-def]
    _, ranks = step
    for _, forward, backward in ranks:
        for events in (forward, backward):
            exchanges = sum(what == "start" for what, _ in events)
            assert exchanges == 2 * 2 * LAYERS  # dispatch and combine, ping and pong
            assert set(exposed(events)) <= {0, exchanges - 1}, events


def test_gradients_are_those_of_one_device(step) -> None:  # type: ignore[no-untyped-def]
    tokens, ranks = step
    for half, mine in tokens.items():
        found = mine.gathered([results[half] for results, _, _ in ranks])
        q, k, v = (t.clone().requires_grad_() for t in (mine.q, mine.k, mine.v))
        x = q
        for _ in range(LAYERS):
            x = dense(mine, x, k, v)
        grads = torch.autograd.grad(x, (q, k, v), mine.grad_out)
        assert_exact(found, [x.detach(), *grads], torch.float64)


def dense(tokens: Tokens, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of whole documents, as autograd sees it."""
    group = q.shape[1] // k.shape[1]
    out = []
    for document in range(tokens.plan.placement.num_documents):
        span = tokens.document(document)
        keys, values = (t[span].repeat_interleave(group, 1) for t in (k, v))
        scores = torch.einsum("nhd,mhd->hnm", q[span], keys) * SCALE
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out.append(torch.einsum("hnm,mhd->nhd", weights, values))
    return torch.cat(out)


def test_local_tasks_are_computed_while_data_is_under_way() -> None:
    plan = Batch(HALVES["ping"], GRAIN).plan()
    tokens = Tokens(plan, torch.float64)

    def rank(transport: LocalTransport) -> list[str]:
        events: list[tuple[str, str]] = []
        q, k, v, grad_out = tokens.of_rank(transport.rank)
        leaves = [t.requires_grad_() for t in (q, k, v)]
        RecordedAttention(transport, "whole", events, **OPTIONS)(*leaves, plan).backward(grad_out)
        return [what for what, _ in events]

    sender, server = LocalWorld(2).run(rank)
    assert sender == ["start", "compute", "wait", "start", "wait"] * 2
    assert server == ["start", "compute", "wait", "compute", "start", "wait"] * 2


def test_wrong_order_of_the_steps_is_refused() -> None:
    plan = Batch([[40], [3]], GRAIN).plan()
    tokens = Tokens(plan, torch.float64)

    def rank(transport: LocalTransport) -> None:
        attention = CoreAttention(transport=transport)
        qkv = tokens.of_rank(transport.rank)[:3]
        pending = attention.dispatch(*qkv, plan)
        with pytest.raises(RuntimeError, match="or use a second CoreAttention"):
            attention.dispatch(*qkv, plan)
        pending.combine()  # computes too
        with pytest.raises(RuntimeError, match="call combine once"):
            pending.combine()
        with pytest.raises(RuntimeError, match="call compute once"):
            pending.compute()

    LocalWorld(2).run(rank)


def test_async_attention_is_freed_after_its_backward() -> None:
    """Its nodes in the graph refer to it, so it must not refer to them: Python cannot collect such
    a cycle, and every layer of every step would stay in memory."""
    plan = distca.plan([[40, 9]], heads=2, kv_heads=1, head_dim=8, **GRAIN)

    def rank(transport: LocalTransport) -> None:
        attention = CoreAttention(transport=transport)
        q, k, v = (torch.randn(49, heads, 8, requires_grad=True) for heads in (2, 1, 1))
        pending = attention.dispatch(q * 1, k * 1, v * 1, plan)
        pending.compute()
        pending.combine().sum().backward()
        known = weakref.ref(pending)
        del pending
        assert known() is None

    LocalWorld(1).run(rank)
