"""Attention sinks: random plans on 1 to 4 ranks against one softmax over the keys and the sink."""

from __future__ import annotations

import pytest
import torch
from attention.bodies import FACES, attend, exact
from attention.test_exact import HEADS, on_all_ranks, uneven
from attention.test_prefixes import tree_plans
from attention.tokens import SCALE, Heads, Tokens, assert_exact
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from planning.oracles import planned
from ranks import RankPool
from strategies import Batch, batches

from distca.attention import sinks as sinks_module
from distca.attention.core import CoreAttention
from distca.attention.inputs import Inputs
from distca.dispatch.agreement import DisagreementError
from distca.dispatch.transports.local import LocalTransport, LocalWorld
from distca.planning.plan import Plan

pytestmark = pytest.mark.usefixtures("poisoned_memory")

GRAIN = {"tile": 16, "min_shard": 16}


@given(batches(), st.sampled_from(HEADS), st.sampled_from(FACES))
def test_any_plan(batch: Batch, heads: Heads, face: str) -> None:
    plan = planned(batch)
    assume(plan is not None and plan.placement.num_documents)
    assert plan is not None
    tokens = Tokens(plan, torch.float64, heads, sinks=True)
    found = on_all_ranks(plan, tokens, "reference", face)
    assert_exact(found, tokens.expected(), torch.float64)


@settings(max_examples=10)
@given(batches(max_ranks=4), st.sampled_from(FACES))
def test_any_plan_over_processes(pool: RankPool, batch: Batch, face: str) -> None:
    plan = planned(batch)
    assume(plan is not None and plan.placement.num_documents and plan.devices.num_ranks <= 4)
    assert plan is not None
    tokens = Tokens(plan, torch.float64, sinks=True)
    options = {"backend": "reference", "face": face}
    found = pool.run(exact, plan, tokens, "cpu", options, ranks=plan.devices.num_ranks)
    assert_exact(tokens.gathered(found), tokens.expected(), torch.float64)


@given(tree_plans(), st.sampled_from(FACES))
def test_any_tree_with_capped_scores(plan: Plan, face: str) -> None:
    """The queries of a shared prompt have one sink, however many documents continue it."""
    tokens = Tokens(plan, torch.float64, sinks=True, softcap=2.0)
    found = on_all_ranks(plan, tokens, "auto", face)
    assert_exact(found, tokens.expected(), torch.float64)


@pytest.mark.parametrize("mask", ["causal", "full", "window:40"])
def test_sdpa(mask: str) -> None:
    """The backward kernels get the results of more than their own keys."""
    plan = uneven().plan(mask=mask)
    tokens = Tokens(plan, torch.float64, sinks=True)
    assert_exact(on_all_ranks(plan, tokens, "sdpa"), tokens.expected(), torch.float64)


@pytest.mark.parametrize("face", FACES)
def test_only_sinks_are_trained(pool: RankPool, face: str) -> None:
    plan = Batch([[201], [64, 7, 1], []], GRAIN).plan()
    tokens = Tokens(plan, torch.float64, sinks=True)
    options = {"backend": "reference", "face": face, "wanted": [(False,) * 3] * 3}
    found = pool.run(exact, plan, tokens, "cpu", options, ranks=3)
    right = tokens.expected()
    right[1:4] = [torch.zeros_like(grad) for grad in right[1:4]]
    assert_exact(tokens.gathered(found), right, torch.float64)


def test_sinks_of_another_dtype_get_a_gradient_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16 queries may have float32 sinks, and long gradients are added up in blocks."""
    monkeypatch.setattr(sinks_module, "_BLOCK_ROWS", 16)
    plan = Batch([[90, 7, 1]], GRAIN).plan()
    tokens = Tokens(plan, torch.bfloat16, sinks=True)
    assert tokens.sinks is not None
    tokens.sinks = tokens.sinks.float()
    *_, found = attend(alone(), plan, tokens)
    *_, right = tokens.expected()
    assert found.dtype == torch.float32
    assert (found.double() - right).norm() < 1e-2 * right.norm()


def test_a_sink_of_minus_infinity_is_none() -> None:
    plan = Batch([[40, 3]], GRAIN).plan()
    tokens = Tokens(plan, torch.float64, sinks=True)
    assert tokens.sinks is not None
    tokens.sinks.fill_(-torch.inf)
    *found, dsinks = attend(alone(), plan, tokens)
    tokens.sinks = None
    assert all(map(torch.equal, found, attend(alone(), plan, tokens)))
    assert not dsinks.any()


def test_layers_with_and_without_sinks_share_a_plan() -> None:
    plan = Batch([[90, 7, 1]], GRAIN).plan()
    attention = alone()
    for with_sinks in (True, False, True):
        tokens = Tokens(plan, torch.float64, sinks=with_sinks)
        assert_exact(attend(attention, plan, tokens), tokens.expected(), torch.float64)


def test_the_op_is_sound() -> None:
    plan = Batch([[9, 4]]).plan()
    attention, tokens = alone(), Tokens(plan, torch.float64, sinks=True)
    q, k, v = (t.requires_grad_() for t in tokens.of_rank(0)[:3])
    assert tokens.sinks is not None
    sinks = tokens.sinks.requires_grad_()
    _, ready = attention._agree_on(Inputs(q, k, v, sinks), plan)
    arguments = (q, k, v, ready.handle, sinks)
    torch.library.opcheck(torch.ops.distca.core_attention.default, arguments)


@pytest.mark.parametrize("face", FACES)
def test_second_derivatives_are_refused(face: str) -> None:
    plan = Batch([[9, 4]]).plan()
    attention, tokens = alone(), Tokens(plan, torch.float64, sinks=True)
    q, k, v = tokens.of_rank(0)[:3]
    assert tokens.sinks is not None
    sinks = tokens.sinks.requires_grad_()
    if face == "op":
        out = attention(q, k, v, plan, sinks=sinks)
    else:
        out = attention.dispatch(q, k, v, plan, sinks=sinks).combine()
    (grad,) = torch.autograd.grad(out.sum(), sinks, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated once, not twice"):
        torch.autograd.grad((grad**2).sum(), sinks)


@pytest.mark.parametrize(
    ("sinks", "sentence"),
    [
        (torch.zeros(3), r"sinks have shape \(3,\), but q has 4 heads: give one per head"),
        (torch.zeros(()), r"sinks have shape \(\), but q has 4 heads: give one per head"),
        (torch.zeros(4, dtype=torch.int64), "sinks are torch.int64 on cpu, but q is torch.float64"),
        (torch.zeros(4, device="meta"), "sinks are torch.float32 on meta, but q is torch.float64"),
    ],
)
def test_wrong_sinks_are_told_on_every_rank(sinks: torch.Tensor, sentence: str) -> None:
    plan = Batch([[201], [64, 7, 1]], GRAIN).plan()
    tokens = Tokens(plan, torch.float64)

    def one_rank(transport: LocalTransport) -> None:
        attention = CoreAttention(transport=transport, backend="reference")
        mine = sinks if transport.rank else torch.zeros(4)
        with pytest.raises(DisagreementError, match=sentence):
            attention(*tokens.of_rank(transport.rank)[:3], plan, sinks=mine)

    LocalWorld(2).run(one_rank)


def test_a_server_is_told_of_layers_with_and_without_sinks() -> None:
    plan = Batch([[201]], {"servers": 1, **GRAIN}).plan()
    tokens = Tokens(plan, torch.float64, sinks=True)

    def one_rank(transport: LocalTransport) -> None:
        attention = CoreAttention(transport=transport, backend="reference")
        qkv = tokens.of_rank(0)[:3]

        def layers() -> None:
            if transport.rank:
                attention.serve(plan, layers=2, backward=0)
            for sinks in (tokens.sinks, None):
                attention(*qkv, plan, sinks=sinks)

        with (
            pytest.raises(DisagreementError, match="the sinks: False on rank 0 but True on rank 1"),
            torch.no_grad(),
        ):
            layers()

    LocalWorld(2).run(one_rank)


def alone() -> CoreAttention:
    transport = LocalTransport(LocalWorld(1), 0)
    return CoreAttention(transport=transport, backend="reference", scale=SCALE)
