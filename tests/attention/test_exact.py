"""All ranks in one process against whole documents on one device, for all kinds of plans.

The other transports are compared with this one (test_distributed.py).
"""

from __future__ import annotations

import pytest
import torch
from attention.bodies import FACES, attend
from attention.tokens import GROUPED, SCALE, Heads, Tokens, assert_exact, errors
from hypothesis import given
from hypothesis import strategies as st
from planning.oracles import planned
from strategies import Batch, batches, causal_batches
from torch import Tensor

from distca.attention.core import CoreAttention
from distca.dispatch.transports.local import LocalTransport, LocalWorld
from distca.planning.plan import Plan
from distca.planning.policies import POLICIES

pytestmark = pytest.mark.usefixtures("poisoned_memory")

# Grouped, multi-query, plain, one; values with other head sizes.
HEADS = ((4, 2, 8), (4, 1, 4), (3, 3, 5), (1, 1, 8), (4, 2, 6, 4), (2, 2, 3, 5))


def on_all_ranks(
    plan: Plan, tokens: Tokens, backend: str, face: str = "op", device: str = "cpu"
) -> list[Tensor]:
    """out, dq, dk and dv by global row."""

    def one_rank(transport: LocalTransport) -> list[Tensor]:
        attention = CoreAttention(
            transport=transport,
            backend=backend,
            scale=SCALE,
            softcap=tokens.softcap,
            deterministic=True,
        )
        return attend(attention, plan, tokens, face=face, device=device)

    return tokens.gathered(LocalWorld(plan.devices.num_ranks).run(one_rank))


def check(
    plan: Plan, dtype: torch.dtype, backend: str, heads: Heads = GROUPED, face: str = "op"
) -> None:
    tokens = Tokens(plan, dtype, heads)
    assert_exact(on_all_ranks(plan, tokens, backend, face), tokens.expected(), dtype)


@given(
    batches(),
    st.sampled_from(HEADS),
    st.sampled_from((*FACES, "steps")),
    st.sampled_from(((torch.float64, "reference"), (torch.float32, "sdpa"))),
)
def test_any_plan_computes_what_one_device_would(
    batch: Batch, heads: Heads, face: str, precision: tuple[torch.dtype, str]
) -> None:
    plan = planned(batch)
    if plan is not None and plan.placement.num_documents:
        check(plan, *precision, heads, face)


@given(causal_batches(), st.sampled_from(["balanced", *sorted(POLICIES)]))
def test_any_placement_and_policy(batch: Batch, way: str) -> None:
    options = {"placement": way} if way == "balanced" else {"policy": way}
    plan = batch.plan(**options)
    check(plan, torch.float64, "reference")


@given(
    batches(),
    st.sampled_from(HEADS),
    st.sampled_from((*FACES, "steps")),
    st.sampled_from(("reference", "auto")),
    st.sampled_from((0.5, 30.0)),
)
def test_any_plan_with_capped_scores(
    batch: Batch, heads: Heads, face: str, backend: str, softcap: float
) -> None:
    plan = planned(batch)
    if plan is not None and plan.placement.num_documents:
        sinks = face != "steps"  # which are added by autograd's nodes
        tokens = Tokens(plan, torch.float64, heads, sinks=sinks, softcap=softcap)
        assert_exact(on_all_ranks(plan, tokens, backend, face), tokens.expected(), torch.float64)


@pytest.mark.parametrize("mask", ["causal", "full", "window:40"])
@pytest.mark.parametrize("options", [{}, {"servers": 2}, {"placement": "balanced"}], ids=str)
def test_sdpa_in_float32(mask: str, options: dict[str, object]) -> None:
    plan = uneven().plan(mask=mask, **options)
    assert plan.traffic.total
    check(plan, torch.float32, "sdpa")


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_bfloat16_is_within_the_error_of_one_device(backend: str) -> None:
    plan, alone = uneven().plan(), Batch([[301, 64, 7, 1, 90, 33]]).plan()
    found, whole = (
        errors(on_all_ranks(p, tokens, backend), tokens.expected())
        for p, tokens in ((p, Tokens(p, torch.bfloat16)) for p in (plan, alone))
    )
    assert len(plan.forward.moved)
    for name, error in found.items():  # what travels is rounded once more
        assert error <= 1.25 * whole[name] + 1e-3, f"{name}: {error:.1e}, alone {whole[name]:.1e}"
        assert whole[name] < 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_documents_do_not_leak(dtype: torch.dtype) -> None:
    plan = uneven().plan()
    tokens = Tokens(plan, dtype)
    before = on_all_ranks(plan, tokens, "sdpa")
    changed = tokens.document(0)  # the long one, whose tasks are everywhere
    for tensor in (tokens.q, tokens.k, tokens.v, tokens.grad_out):
        tensor[changed] = tensor[changed] * -3 + 1
    after = on_all_ranks(plan, tokens, "sdpa")
    others = torch.ones(len(tokens.q), dtype=torch.bool)
    others[changed] = False
    for was, now in zip(before, after, strict=True):
        assert torch.equal(was[others], now[others])
        assert not torch.equal(was[changed], now[changed])


def uneven() -> Batch:
    return Batch([[301], [64, 7, 1], [], [90, 33]], {"tile": 16, "min_shard": 16})
