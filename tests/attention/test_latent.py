"""Latents travel instead of keys and values: random plans on 1 to 4 ranks against plain maths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention.bodies import FACES, attend, exact
from attention.test_exact import on_all_ranks, uneven
from attention.test_prefixes import tree_plans
from attention.tokens import LATENT, SCALE, Heads, Tokens, assert_exact, errors, expand
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from planning.oracles import planned
from ranks import RankPool
from strategies import Batch, batches
from torch import Tensor

import distca
from distca.attention.core import CoreAttention
from distca.attention.inputs import Inputs
from distca.dispatch.agreement import DisagreementError
from distca.dispatch.latent import Latent
from distca.dispatch.layout import Layout
from distca.dispatch.transports.local import LocalTransport, LocalWorld
from distca.planning.plan import Plan

pytestmark = pytest.mark.usefixtures("poisoned_memory")

MIXED: dict[str, Any] = {"latent_dim": 5, "rope_dim": 3, "tile": 1, "min_shard": 1, "cost": "pairs"}
GRAIN = {"tile": 16, "min_shard": 16}
HEADS: tuple[Heads, ...] = ((3, 3, 8, 4), (4, 2, 6), (2, 2, 4, 7))  # as in MLA, grouped, others
SERVERS = {"servers": 2, **GRAIN}


@settings(max_examples=40)
@given(batches(), st.sampled_from(HEADS), st.sampled_from((*FACES, "steps")), st.booleans())
def test_any_plan(batch: Batch, heads: Heads, face: str, sinks: bool) -> None:
    """Windows, chunks, bands, dedicated servers, backward plans of their own."""
    plan = planned(batch)
    assume(plan is not None and plan.placement.num_documents)
    assert plan is not None
    sinks = sinks and face != "steps"  # which are added by autograd's nodes
    tokens = Tokens(plan, torch.float64, heads, sinks=sinks, latent=LATENT)
    found = on_all_ranks(plan, tokens, "reference", face)
    assert_exact(found, tokens.expected(), torch.float64)


@settings(max_examples=10)
@given(batches(max_ranks=4), st.sampled_from(FACES))
def test_any_plan_over_processes(pool: RankPool, batch: Batch, face: str) -> None:
    plan = planned(batch)
    assume(plan is not None and plan.placement.num_documents and plan.devices.num_ranks <= 4)
    assert plan is not None
    tokens = Tokens(plan, torch.float64, HEADS[0], latent=LATENT)
    options = {"backend": "reference", "face": face}
    found = pool.run(exact, plan, tokens, "cpu", options, ranks=plan.devices.num_ranks)
    assert_exact(tokens.gathered(found), tokens.expected(), torch.float64)


@settings(max_examples=15)
@given(tree_plans(), st.sampled_from(FACES))
def test_any_tree(plan: Plan, face: str) -> None:
    tokens = Tokens(plan, torch.float64, HEADS[0], latent=LATENT)
    found = on_all_ranks(plan, tokens, "sdpa", face)
    assert_exact(found, tokens.expected(), torch.float64)


@pytest.mark.parametrize("latent", [(1, 1), (5, 0)], ids=["smallest", "nothing is rotary"])
def test_unusual_sizes(latent: tuple[int, int]) -> None:
    plan = uneven().plan(servers=1)
    tokens = Tokens(plan, torch.float64, HEADS[0], latent=latent)
    assert_exact(on_all_ranks(plan, tokens, "reference"), tokens.expected(), torch.float64)


def test_two_way_spans() -> None:
    image = {"length": 201, "two_way": [[7, 90], [100, 180]]}
    plan = Batch([[image], [64, 1]], GRAIN).plan()
    tokens = Tokens(plan, torch.float64, HEADS[0], latent=LATENT)
    assert_exact(on_all_ranks(plan, tokens, "reference"), tokens.expected(), torch.float64)


def test_ping_pong() -> None:
    """Two exchanges are under way at the same time, each with its own matrix."""
    plans = [Batch(r, GRAIN).plan() for r in ([[201], [64, 7], [1]], [[33, 9], [9], [150]])]
    halves = [Tokens(plan, torch.float64, HEADS[0], latent=LATENT) for plan in plans]

    def one_rank(transport: LocalTransport) -> list[list[Tensor]]:
        pair = [CoreAttention(transport=transport, backend="reference", scale=SCALE) for _ in plans]
        leaves, pending = [], []
        for attention, plan, tokens in zip(pair, plans, halves, strict=True):
            rows = tokens.rows(transport.rank)
            q, c, r, w = (t.requires_grad_() for t in own(tokens, rows))
            leaves.append([q, c, r, w])
            k, v = expand(Latent(c, r, w), 3, 8)
            pending.append(attention.dispatch(q, k, v, plan, latent=Latent(c, r, w)))
        for half in pending:
            half.compute()
        outs = [half.combine() for half in pending]
        grads = [t.grad_out[t.rows(transport.rank)] for t in halves]
        torch.autograd.backward(outs, grads)
        return [
            [out.detach(), *(t.grad for t in mine if t.grad is not None)]
            for out, mine in zip(outs, leaves, strict=True)
        ]

    found = LocalWorld(3).run(one_rank)
    for number, tokens in enumerate(halves):
        gathered = tokens.gathered([result[number] for result in found])
        assert_exact(gathered, tokens.expected(), torch.float64)


def own(tokens: Tokens, rows: Tensor) -> list[Tensor]:
    """q, latents and rotary parts of rows, and the matrix."""
    assert tokens.latent is not None
    return [*(t[rows] for t in (tokens.q, *tokens.factors)), tokens.latent.weight.clone()]


def test_bfloat16_is_within_the_error_of_one_device() -> None:
    plan, alone = uneven().plan(), Batch([[301, 64, 7, 1, 90, 33]]).plan()
    found, whole = (
        errors(on_all_ranks(p, tokens, "sdpa"), tokens.expected())
        for p, tokens in (
            (p, Tokens(p, torch.bfloat16, HEADS[0], latent=LATENT)) for p in (plan, alone)
        )
    )
    for name, error in found.items():
        assert error <= 2 * whole[name] + 5e-3, f"{name}: {error:.1e}, alone {whole[name]:.1e}"


def test_fewer_bytes_travel() -> None:
    """What is sent is what the plan says, up to the padding of messages and the log-sum-exp."""
    heads: Heads = (8, 8, 24, 16)
    sizes = {"heads": 8, "kv_heads": 8, "head_dim": 24, "v_head_dim": 16}
    ranks = [[600], [64, 64]]
    expanded = distca.plan(ranks, **sizes, **SERVERS)
    plan = distca.plan(ranks, **sizes, latent_dim=16, rope_dim=8, **SERVERS)
    assert plan.traffic.total < expanded.traffic.total / 2
    tokens = Tokens(plan, torch.bfloat16, heads, latent=(16, 8))

    class Counted(LocalTransport):
        def start(self, send: Any, recv: Any, send_bytes: Any, *rest: Any) -> Any:
            messages[self.rank].append(sum(send_bytes))
            return super().start(send, recv, send_bytes, *rest)

    messages: list[list[int]] = [[] for _ in range(4)]

    def one_rank(transport: LocalTransport) -> None:
        counted = Counted(transport.world, transport.rank)
        attend(CoreAttention(transport=counted, scale=SCALE, backend="sdpa"), plan, tokens)

    LocalWorld(4).run(one_rank)
    sent = [sum(sum(rank[i : i + 2]) for rank in messages) for i in (0, 2)]
    parts = 128 * 16 * 4  # padding: 128 bytes for each tensor and pair of ranks
    lse = 4 * 8 * int(plan.placement.tokens.sum())
    assert 0 <= sent[0] - plan.traffic.total <= parts + lse
    assert 0 <= sent[1] - plan.backward_traffic.total <= parts


def test_the_op_is_sound() -> None:
    plan = Batch([[9, 4]]).plan()
    tokens = Tokens(plan, torch.float64, HEADS[0], latent=LATENT)
    assert tokens.latent is not None
    inputs = Inputs(*tokens.of_rank(0)[:3], None, tokens.latent)
    for tensor in (*inputs[:3], *tokens.latent):
        tensor.requires_grad_()
    attention = CoreAttention(transport=LocalTransport(LocalWorld(1), 0), backend="reference")
    _, ready = attention._agree_on(inputs, plan)
    arguments = (*inputs[:3], ready.handle, None, *tokens.latent)
    torch.library.opcheck(torch.ops.distca.core_attention.default, arguments)


def test_only_the_matrix_is_trained(pool: RankPool) -> None:
    plan = Batch([[201], [64, 7, 1], []], GRAIN).plan()
    tokens = Tokens(plan, torch.float64, HEADS[0], latent=LATENT)
    options = {"backend": "reference", "wanted": [(False,) * 3] * 3}
    found = pool.run(exact, plan, tokens, "cpu", options, ranks=3)
    right = tokens.expected()
    right[1:4] = [torch.zeros_like(grad) for grad in right[1:4]]
    assert_exact(tokens.gathered(found), right, torch.float64)


def _without_matrix(latent: Latent) -> Any:
    return Latent(latent.latent, latent.rotary, None)  # type: ignore[arg-type]


WRONG = {
    "without a matrix": (_without_matrix, "without the matrix that expands them: pass distca.Lat"),
    "rows": (
        lambda latent: latent._replace(latent=latent.latent[1:]),
        r"latents \(\d+, 5\) and rotary parts \(\d+, 3\) for \d+ keys: give one row of each",
    ),
    "matrix": (
        lambda latent: latent._replace(weight=latent.weight[1:]),
        r"a matrix \(26, 5\) expands latents of 5 to 3 heads .* it must be \(27, 5\)",
    ),
    "dtype": (
        lambda latent: latent._replace(weight=latent.weight.float()),
        "weight of the latents has shape .* and is torch.float32 on cpu: it must have two dim",
    ),
    "order of rows": (
        lambda latent: latent._replace(weight=latent.weight.flip(0)),
        "k is not what the latents expand to .* rows of the matrix are by head",
    ),
    "none": (lambda latent: None, "the latent dim: 5 on rank 0 but 0 on rank 1; give latents to"),
}


def latent_of_rank(tokens: Tokens, rank: int) -> Latent:
    rows = tokens.rows(rank)
    assert tokens.latent is not None
    return Latent(*(t[rows] for t in tokens.factors), tokens.latent.weight)


@pytest.mark.parametrize("what", WRONG)
def test_wrong_latents_are_told_on_every_rank(what: str) -> None:
    plan = Batch([[201], [64, 7, 1]], GRAIN).plan()
    change, sentence = WRONG[what]
    tokens = Tokens(plan, torch.float64, HEADS[0], latent=LATENT)

    def one_rank(transport: LocalTransport) -> None:
        attention = CoreAttention(transport=transport, backend="reference")
        latent = latent_of_rank(tokens, transport.rank)
        mine = change(latent) if transport.rank else latent
        with pytest.raises(DisagreementError, match=sentence):
            attention(*tokens.of_rank(transport.rank)[:3], plan, latent=mine)

    LocalWorld(2).run(one_rank)


@pytest.mark.parametrize("which", ["latent", "rotary", "weight"])
def test_a_factor_of_another_dtype_is_refused_also_in_later_layers(which: str) -> None:
    plan = distca.plan([[5], [40]], heads=3, kv_heads=3, head_dim=8, v_head_dim=4, **MIXED)
    tokens = Tokens(plan, torch.float32, HEADS[0], latent=LATENT)

    def one_rank(transport: LocalTransport) -> None:
        attention = CoreAttention(transport=transport, backend="reference")
        latent = latent_of_rank(tokens, transport.rank)
        q, k, v, _ = tokens.of_rank(transport.rank)
        attention(q, k, v, plan, latent=latent)
        wrong = latent._replace(**{which: getattr(latent, which).double()})
        with pytest.raises(DisagreementError, match=f"{which} of the latents .* torch.float64"):
            attention(q, k, v, plan, latent=wrong)

    LocalWorld(2).run(one_rank)


def test_queries_may_be_views_where_only_the_matrix_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 0 has one call for all of its tokens, and sends its matrix to the server."""
    options = MIXED | {"servers": 1, "workers_serve": True}
    plan = distca.plan([[14], [20]], heads=3, kv_heads=3, head_dim=8, v_head_dim=4, **options)
    tokens = Tokens(plan, torch.float64, HEADS[0], latent=LATENT)
    of_rank = tokens.of_rank

    def views(rank: int) -> list[Tensor]:
        return [t.transpose(0, 1).contiguous().transpose(0, 1) for t in of_rank(rank)]

    monkeypatch.setattr(tokens, "of_rank", views)
    layout = Layout.of(plan, 0)
    assert layout.matrix.send
    assert not layout.q.send
    assert not layout.kv.send
    found = on_all_ranks(plan, tokens, "reference")
    assert_exact(found, tokens.expected(), torch.float64)
