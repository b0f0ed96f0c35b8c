"""Two-way spans: queries that also see the keys behind them, on any number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention.bodies import FACES, exact
from attention.test_exact import check, on_all_ranks
from attention.test_prefixes import SMALL, trees
from attention.tokens import GROUPED, Tokens, assert_exact, errors
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import RankPool
from strategies import two_way_spans

import distca
from distca.planning.placement import Placement
from distca.planning.plan import Plan
from distca.planning.two_way import TwoWaySpans

pytestmark = pytest.mark.usefixtures("poisoned_memory")

FINE = SMALL | {"cost": "pairs"}


@st.composite
def two_way_plans(draw: st.DrawFn, max_ranks: int = 4) -> Plan:
    """Plans of documents with two-way spans, of which some share prefixes."""
    lengths, prefixes = draw(trees())
    cuts: dict[int, set[int]] = {}
    for child in range(len(lengths)):
        parent, prefix = int(prefixes.parent[child]), int(prefixes.length[child])
        while prefix and prefix <= prefixes.length[parent]:
            parent = int(prefixes.parent[parent])
        cuts.setdefault(parent, set()).add(prefix)
    spans = {}
    for document, length in enumerate(lengths.tolist()):
        drawn = draw(two_way_spans(length, int(prefixes.length[document])))
        ends = cuts.get(document, set())
        spans[document] = [s for s in drawn if not any(s[0] < end < s[1] for end in ends)]
    two_way = TwoWaySpans.of({d: [(a, b) for a, b in s] for d, s in spans.items()})
    placement = Placement.in_order(lengths, draw(st.integers(1, max_ranks)), prefixes, two_way)
    options: dict[str, Any] = SMALL | {
        "mask": draw(st.sampled_from(["causal", "causal", "window:13"])),
        "servers": draw(st.integers(0, max_ranks - placement.num_workers)),
        "cost": draw(st.sampled_from(["pairs", "analytic"])),
    }
    if draw(st.booleans()):
        placement = distca.place(placement, **options)
    return distca.plan(placement, **options)


@settings(max_examples=40)
@given(
    two_way_plans(),
    st.sampled_from((*FACES, "steps")),
    st.sampled_from(["reference", "blocks", "sdpa"]),
    st.sampled_from([0.0, 2.0]),
)
def test_any_plan_computes_what_one_device_would(
    plan: Plan, face: str, backend: str, softcap: float
) -> None:
    softcap = 0.0 if backend == "sdpa" else softcap
    tokens = Tokens(plan, torch.float64, sinks=face != "steps", softcap=softcap)
    assert_exact(on_all_ranks(plan, tokens, backend, face), tokens.expected(), torch.float64)


@settings(max_examples=5)
@given(two_way_plans(max_ranks=3), st.sampled_from(FACES))
def test_any_plan_over_processes(pool: RankPool, plan: Plan, face: str) -> None:
    tokens, ranks = Tokens(plan, torch.float64), plan.devices.num_ranks
    options = {"backend": "auto", "face": face}
    found = tokens.gathered(pool.run(exact, plan, tokens, "cpu", options, ranks=ranks))
    assert_exact(found, tokens.expected(), torch.float64)


@pytest.mark.parametrize("mask", ["causal", "window:40"])
def test_images_in_float32(mask: str) -> None:
    """A long document with images is cut inside them, and both parts of it move."""
    image = {"length": 301, "two_way": [[5, 100], [100, 180], [200, 301]]}
    plan = distca.plan([[image], [64, {"length": 33, "two_way": [[0, 20]]}]], mask=mask, **FINE)
    assert any(5 < task["q"][1] < 100 for task in plan.to_json()["tasks"])
    assert len(plan.forward.moved)
    check(plan, torch.float32, "sdpa")


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_bfloat16_is_near_the_error_of_one_device(backend: str) -> None:
    """Outputs of the two kernels are rounded before they are merged, and so are their gradients."""
    image = {"length": 301, "two_way": [[5, 100], [100, 180], [200, 301]]}
    plan = distca.plan([[image], [64, 33]], **FINE)
    alone = distca.plan([[301, 64, 33]], **FINE)
    found, causal = (
        errors(on_all_ranks(p, tokens, backend), tokens.expected())
        for p, tokens in ((p, Tokens(p, torch.bfloat16)) for p in (plan, alone))
    )
    for name, error in found.items():
        assert error <= 1.6 * causal[name] + 1e-3, f"{name}: {error:.1e}, causal {causal[name]:.1e}"


def test_full_documents_are_spans_of_all_their_tokens() -> None:
    spans = distca.plan([[{"length": n, "two_way": [[0, n]]} for n in (90, 1, 30)], [50]], **FINE)
    masks = distca.plan([[90, 1, 30], [50]], mask=["full"] * 3 + ["causal"], **FINE)
    found, right = (
        on_all_ranks(plan, Tokens(plan, torch.float64, GROUPED), "reference")
        for plan in (spans, masks)
    )
    assert_exact(found, right, torch.float64)
