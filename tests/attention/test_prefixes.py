"""Documents that continue others: the prompt is attended once, and its gradients add up."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attention.bodies import FACES
from attention.test_exact import check
from attention.tokens import Tokens
from hypothesis import given
from hypothesis import strategies as st

import distca
from distca.planning.placement import Placement
from distca.planning.plan import Plan
from distca.planning.prefixes import NO_PARENT, Prefixes

pytestmark = pytest.mark.usefixtures("poisoned_memory")

SMALL = {"heads": 4, "kv_heads": 2, "head_dim": 8, "tile": 8, "min_shard": 8}


@st.composite
def trees(draw: st.DrawFn) -> tuple[np.ndarray, Prefixes]:
    """Lengths and prefixes of documents, in any order; parents have parents of their own."""
    own = draw(st.lists(st.integers(1, 60), min_size=1, max_size=8))
    order = draw(st.permutations(range(len(own))))
    lengths, parent, prefix = np.array(own), np.full(len(own), NO_PARENT), np.zeros(len(own), int)
    for index, document in enumerate(order):
        if index and draw(st.booleans()):
            parent[document] = order[draw(st.integers(0, index - 1))]
            prefix[document] = draw(st.integers(1, int(lengths[parent[document]])))
            lengths[document] += prefix[document]
    return lengths, Prefixes(parent, prefix)


@st.composite
def tree_plans(draw: st.DrawFn) -> Plan:
    lengths, prefixes = draw(trees())
    workers = draw(st.integers(1, 4))
    if draw(st.booleans()):
        placement = Placement.in_order(lengths, workers, prefixes)
    else:
        worker = np.sort(draw(st.lists(st.integers(0, workers - 1),
                                       min_size=len(lengths), max_size=len(lengths))))  # fmt: skip
        document = np.array(draw(st.permutations(range(len(lengths)))))
        placement = Placement(
            lengths, document, prefixes.length[document], lengths[document], worker, workers,
            prefixes,
        )  # fmt: skip
    mask = draw(st.sampled_from(["causal", "causal", "window:13", "chunk:13"]))
    options = SMALL | {"mask": mask, "servers": draw(st.integers(0, 2))}
    if draw(st.booleans()):
        placement = distca.place(placement, **options)
    return distca.plan(placement, **options)


@given(tree_plans(), st.sampled_from((*FACES, "steps")))
def test_any_tree_computes_what_whole_rows_would(plan: Plan, face: str) -> None:
    check(plan, torch.float64, "reference", face=face)


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_completions_of_a_prompt(backend: str) -> None:
    """Each completion behind a copy of its prompt gives the same results."""
    prompt, completions = 40, (9, 30, 1, 17)
    shared = distca.plan(
        [[prompt, {"length": 9, "parent": 0, "prefix": 40}],
         [{"length": n, "parent": 0, "prefix": 40} for n in completions[1:]]], **SMALL
    )  # fmt: skip
    check(shared, torch.float32 if backend == "sdpa" else torch.float64, backend)
    tokens = Tokens(shared, torch.float64)
    rows = [torch.tensor(tokens.keys(number)) for number in range(5)]
    q, k, v = (t.clone().requires_grad_() for t in (tokens.q, tokens.k, tokens.v))
    separate = []
    for number, row in enumerate(rows):
        scores = torch.einsum("nhd,mhd->hnm", q[row], k[row].repeat_interleave(2, 1)) * 0.3
        causal = torch.ones(len(row), len(row)).triu(1).bool()
        weights = scores.masked_fill(causal, -torch.inf).softmax(-1)
        out = torch.einsum("hnm,mhd->nhd", weights, v[row].repeat_interleave(2, 1))
        separate.append(out if number == 0 else out[prompt:])
    assert torch.allclose(torch.cat(separate), tokens.expected()[0], atol=1e-12)


def test_a_prefix_is_sent_once_to_a_server() -> None:
    """Sixteen completions on one rank fetch the keys of their prompt once."""
    child = {"length": 8, "parent": 0, "prefix": 512}
    plan = distca.plan([[512], [child] * 16], scheduler="home", **SMALL)
    key_bytes = plan.shape.kv_bytes
    assert plan.traffic.total == 512 * key_bytes
    assert plan.backward_traffic.total == 2 * 512 * key_bytes
