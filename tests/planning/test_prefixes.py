"""Documents that continue others: bytes, bounds, files and mistakes."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from attention.test_prefixes import SMALL, tree_plans
from hypothesis import given
from hypothesis import strategies as st

import distca
from distca.planning.placement import Placement
from distca.planning.plan import Plan
from distca.planning.prefixes import Prefixes
from distca.planning.spans import Spans

Token = tuple[int, int]  # document, position


def owner(plan: Plan, document: int, position: int) -> Token:
    """Returns the document that has the token, found by following parents."""
    prefixes = plan.placement.prefixes
    while position < prefixes.length[document]:
        document = int(prefixes.parent[document])
    return document, position


def homes(plan: Plan) -> dict[Token, int]:
    return {
        (document, position): worker
        for worker, document, start, stop in plan.placement.shards()
        for position in range(start, stop)
    }


@given(tree_plans())
def test_bytes_are_those_of_every_token_sent_once(plan: Plan) -> None:
    home, shape = homes(plan), plan.shape
    assert len(home) == int(plan.placement.tokens.sum())
    sent = 0
    needed: dict[int, set[Token]] = {}
    tasks = plan.forward
    for index, server in enumerate(tasks.server.tolist()):
        if tasks.home[index] != server:
            sent += int(tasks.queries[index]) * 2 * shape.q_bytes
        for position in range(int(tasks.kv_start[index]), int(tasks.kv_stop[index])):
            token = owner(plan, int(tasks.document[index]), position)
            needed.setdefault(server, set()).add(token)
    for server, keys in needed.items():
        sent += shape.kv_bytes * sum(home[key] != server for key in keys)
    assert plan.traffic.total == sent
    assert not plan.meets_bound or plan.bytes_lower_bound <= sent


@given(tree_plans())
def test_a_plan_survives_its_file(plan: Plan) -> None:
    again = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again.fingerprint == plan.fingerprint
    flat = plan.placement.prefixes.exist and plan.to_json()
    if flat:
        for shards in flat["placement"]:
            for shard in shards:
                shard.pop("parent", None)
                shard.pop("prefix", None)
        with pytest.raises(ValueError, match="placed nowhere"):
            Plan.from_json(flat)


@pytest.mark.parametrize("ranks", [4, 8])
def test_rollouts_are_balanced(ranks: int) -> None:
    """Prompts with eight uneven completions each, placed anew and planned as given."""
    rng = np.random.default_rng(0)
    entries: list[Any] = []
    for _ in range(2 * ranks):
        parent = len(entries)
        entries.append(2048)
        lengths = rng.lognormal(6.5, 0.8, 8).astype(int) + 1
        entries += [{"length": int(n), "parent": parent, "prefix": 2048} for n in lengths]
    one = Placement.from_ranks([entries])
    given_order = Placement.in_order(one.lengths, ranks, one.prefixes)
    for placement in (given_order, distca.place(given_order, model="llama3-8b")):
        plan = distca.plan(placement, model="llama3-8b")
        assert plan.imbalance <= 1.02
        assert np.ptp(placement.tokens) <= 128
        copies = distca.plan([[int(n) for n in one.lengths]], model="llama3-8b")
        assert plan.placement.tokens.sum() < 0.5 * copies.placement.tokens.sum()


CASES: dict[str, tuple[list[Any], str]] = {
    "unknown parent": ([{"length": 3, "parent": 7, "prefix": 2}], "only the documents 0 to 0"),
    "no prefix": ([9, {"length": 3, "parent": 0}], "prefix of at least one token"),
    "no parent": ([{"length": 3, "prefix": 2}], "prefix of at least one token"),
    "too long": ([9, {"length": 3, "parent": 0, "prefix": 10}], "longer than the parent"),
    "itself": ([{"length": 3, "parent": 0, "prefix": 2}], "must not form a cycle"),
    "cycle": (
        [{"length": 3, "parent": 1, "prefix": 2}, {"length": 3, "parent": 0, "prefix": 2}],
        "must not form a cycle",
    ),
    "unknown field": ([{"length": 3, "child": 0}], "a shard has document, start and stop"),
    "empty": ([9, {"length": 0, "parent": 0, "prefix": 2}], "0 tokens: it needs >= 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_parents_that_cannot_be_are_refused(name: str) -> None:
    entries, words = CASES[name]
    with pytest.raises(ValueError, match=words):
        distca.plan([entries], **SMALL)


def test_shards_of_a_document_agree_on_its_parent() -> None:
    shard = {"document": 5, "start": 4, "stop": 8, "parent": 0, "prefix": 4}
    more = shard | {"start": 8, "stop": 10}
    assert distca.plan([[9, shard], [more]], **SMALL).placement.lengths.tolist() == [9, 10]
    with pytest.raises(ValueError, match="give all of its shards the same"):
        distca.plan([[9, shard], [more | {"prefix": 3}]], **SMALL)
    with pytest.raises(ValueError, match="are placed twice"):
        distca.plan([[9, shard | {"stop": 9}], [more]], **SMALL)


def test_masks_and_placers_without_prefixes_refuse_them() -> None:
    ranks = [[9, {"length": 3, "parent": 0, "prefix": 5}]]
    with pytest.raises(ValueError, match="document 1 has a prefix and mask full"):
        distca.plan(ranks, mask="full", **SMALL)
    with pytest.raises(ValueError, match="placer karmarkar-karp does not know"):
        distca.place(Placement.from_ranks(ranks), placer="karmarkar-karp", **SMALL)


@given(tree_plans())
def test_spans_are_divided_by_the_documents_that_have_the_tokens(plan: Plan) -> None:
    lengths, prefixes = plan.placement.lengths, plan.placement.prefixes
    whole = Spans(np.arange(len(lengths)), np.zeros_like(lengths), lengths)
    number, parts = prefixes.owned(whole)
    found = [
        (number, (document, position))
        for number, document, start, stop in zip(number, *parts, strict=True)
        for position in range(start, stop)
    ]
    assert found == [
        (document, owner(plan, document, position))
        for document, length in enumerate(lengths)
        for position in range(length)
    ]


@given(st.integers(1, 40))
def test_a_chain_of_any_depth(depth: int) -> None:
    """Each document continues all of the one before it."""
    parent = np.arange(-1, depth - 1)
    lengths = np.arange(1, depth + 1)
    placement = Placement.in_order(lengths, 1, Prefixes(parent, lengths - 1))
    plan = distca.plan(placement, **SMALL)
    assert plan.placement.tokens.tolist() == [depth]
    pairs = plan.forward.pairs(plan.placement, plan.reach)
    assert int(pairs.sum()) == depth * (depth + 1) // 2


def test_documents_that_share_a_prefix_have_one_mask() -> None:
    child = {"length": 9, "parent": 0, "prefix": 40}
    with pytest.raises(ValueError, match="document 2 has mask window:30, but document 0, which"):
        distca.plan([[40], [child, child]], mask=["causal", "causal", "window:30"], **SMALL)
