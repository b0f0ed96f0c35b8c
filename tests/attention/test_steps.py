"""The steps of all ranks in one process against whole documents on one device."""

from __future__ import annotations

import pytest
import torch
from attention.gloo_ranks import run_ranks
from attention.tokens import EXACT, SCALE, Tokens
from hypothesis import given
from planning.oracles import planned
from strategies import Batch, batches
from torch import Tensor

from distca.attention.backend import Traits
from distca.attention.choice import choose
from distca.attention.steps import Route, backward, forward
from distca.dispatch.layout import Layout
from distca.dispatch.transport import LocalHub, LocalTransport
from distca.planning.masks import Mask
from distca.planning.plan import Plan


def run(plan: Plan, tokens: Tokens, name: str, hub: LocalHub) -> list[Tensor]:
    """Forward and backward of all ranks; out, dq, dk and dv by global row."""
    masks = sorted({Mask(int(reach)) for reach in plan.reach}, key=str)
    backend = choose(name, Traits.of(tokens.q, tokens.k, masks, deterministic=True))

    def one_rank(transport: LocalTransport) -> tuple[Tensor, ...]:
        rows = tokens.rows(transport.rank)
        q, k, v, grad_out = (t[rows] for t in (tokens.q, tokens.k, tokens.v, tokens.grad_out))
        routes = [
            Route.of(Layout.of(plan, transport.rank, backward=way), q.device)
            for way in (False, True)
        ]
        attended = forward(routes[0], transport, backend, q, k, v, SCALE)
        grads = backward(routes[1], transport, backend, grad_out, q, k, v, attended, SCALE)
        return (attended.out, *grads)

    results = hub.run(one_rank)
    gathered = []
    for index, like in enumerate((tokens.q, tokens.q, tokens.k, tokens.k)):
        whole = torch.full_like(like, torch.nan)
        for rank, result in enumerate(results):
            whole[tokens.rows(rank)] = result[index]
        gathered.append(whole)
    return gathered


def check(plan: Plan, dtype: torch.dtype, name: str) -> None:
    tokens = Tokens(plan, dtype)
    found = run(plan, tokens, name, LocalHub(plan.servers.num_ranks))
    for what, ours, exact in zip(("out", "dq", "dk", "dv"), found, tokens.expected(), strict=True):
        error = (ours - exact).norm() / exact.norm().clamp_min(1.0)
        assert error <= EXACT[dtype], f"{what} is off by {error:.2e}"


@given(batches())
def test_any_plan_computes_what_one_device_would(batch: Batch) -> None:
    plan = planned(batch)
    if plan is not None and plan.placement.num_documents:
        check(plan, torch.float64, "reference")


@pytest.mark.parametrize("mask", ["causal", "full", "window:40"])
@pytest.mark.parametrize("options", [{}, {"servers": 2}, {"placement": "balanced"}], ids=str)
def test_sdpa_in_float32(mask: str, options: dict[str, object]) -> None:
    plan = Batch([[301], [64, 7, 1], [], [90, 33]], {"tile": 16, "min_shard": 16}).plan(
        mask=mask, **options
    )
    assert len(plan.forward.moved) or plan.placement.num_workers
    check(plan, torch.float32, "sdpa")


@pytest.mark.parametrize("options", [{}, {"servers": 1}], ids=["in-place", "dedicated"])
def test_gloo_gives_the_bits_of_the_local_oracle(options: dict[str, object]) -> None:
    spanning = {"document": 0, "start": 0, "stop": 150}
    ranks = [[spanning], [{"document": 0, "start": 150, "stop": 201}, 64, 7, 1]]
    plan = Batch(ranks, {"tile": 16, "min_shard": 16}).plan(**options)
    tokens = Tokens(plan, torch.float64)
    assert len(plan.forward.moved)
    rows = [tokens.rows(rank) for rank in range(plan.servers.num_ranks)]
    whole = (tokens.q, tokens.k, tokens.v, tokens.grad_out)
    inputs = [tuple(tensor[mine] for tensor in whole) for mine in rows]
    local = run(plan, tokens, "reference", LocalHub(plan.servers.num_ranks))
    for mine, results in zip(rows, run_ranks(plan, inputs, SCALE), strict=True):
        for ours, exact in zip(results, local, strict=True):
            assert torch.equal(ours, exact[mine])


def test_an_error_on_one_rank_ends_all() -> None:
    def fail(transport: LocalTransport) -> None:
        if transport.rank == 1:
            raise KeyError("rank 1 lost its head")
        transport.start(torch.zeros(2, dtype=torch.uint8), [1, 1], [1, 1])()

    with pytest.raises(KeyError, match="lost its head"):
        LocalHub(2).run(fail)


def test_ranks_with_different_plans_are_told() -> None:
    def start(transport: LocalTransport) -> None:
        size = transport.rank
        transport.start(torch.zeros(2 * size, dtype=torch.uint8), [size] * 2, [size] * 2)()

    with pytest.raises(ValueError, match="hold different plans"):
        LocalHub(2).run(start)
