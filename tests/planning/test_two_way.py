"""Two-way spans: keys and pairs against the dense mask, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning.oracles import dense_mask
from strategies import SHAPE, two_way_spans

import distca
from distca.pipeline.pool import pool_placements
from distca.planning.masks import reach_of
from distca.planning.placement import Placement
from distca.planning.plan import Plan
from distca.planning.spans import as_ints

FINE = {"model": SHAPE, "cost": "pairs", "tile": 4, "min_shard": 4}


def dense(mask: str, length: int, spans: list[list[int]]) -> np.ndarray:
    seen = dense_mask(mask, length).copy()
    for start, stop in spans:
        for query in range(start, stop):
            seen[query, query:stop] = True
    return seen


@given(st.data(), st.sampled_from(["causal", "window:1", "window:7", "window:100"]))
def test_keys_and_pairs_are_those_of_the_dense_mask(data: st.DataObject, mask: str) -> None:
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    spans = [data.draw(two_way_spans(length)) for length in lengths]
    entries = [{"length": n, "two_way": s} for n, s in zip(lengths, spans, strict=True)]
    masks = Placement.from_ranks([entries]).masks(reach_of(mask, len(lengths)))
    number = data.draw(st.integers(0, len(lengths) - 1))
    start = data.draw(st.integers(0, lengths[number] - 1))
    stop = data.draw(st.integers(start + 1, lengths[number]))
    seen = dense(mask, lengths[number], spans[number])[start:stop]
    document, a, b = as_ints([number]), as_ints([start]), as_ints([stop])
    assert masks.pairs(document, a, b).tolist() == [seen.sum()]
    keys = range(int(masks.first_key(document, a)[0]), int(masks.last_key(document, b)[0]))
    assert list(keys) == np.flatnonzero(seen.any(axis=0)).tolist()
    assert masks.keys_needed(number, (start, stop)) == (keys.start, keys.stop)


@settings(max_examples=30)
@given(st.data(), st.sampled_from(["causal", "window:7"]))
def test_no_plan_moves_fewer_bytes_than_the_bound(data: st.DataObject, mask: str) -> None:
    lengths = data.draw(st.lists(st.integers(1, 90), min_size=1, max_size=5))
    entries = [{"length": n, "two_way": data.draw(two_way_spans(n))} for n in lengths]
    plan = distca.plan([entries, [], [8]], mask=mask, tolerance=0.1, **FINE)
    if plan.meets_bound:
        assert plan.bytes_lower_bound <= plan.traffic.total


def test_a_prefix_lm_by_hand() -> None:
    """Queries 0 to 7 see keys 0 to 7; query 8 sees 9 keys, and so on."""
    plan = distca.plan([[{"length": 12, "two_way": [[0, 8]]}]], **FINE)
    assert plan.forward_load_ps.tolist() == [2 * (64 + 9 + 10 + 11 + 12)]
    assert plan.to_json()["two_way"] == [[0, 0, 8]]


def test_a_task_that_ends_inside_a_span_needs_its_last_key() -> None:
    plan = distca.plan([[{"length": 64, "two_way": [[6, 50]]}], []], **FINE)
    tasks = plan.to_json()["tasks"]
    assert len(tasks) > 1
    assert plan.meets_bound
    for task in tasks:
        start, stop = task["q"]
        assert task["kv"] == [0, 50 if 6 < stop <= 50 else stop], (start, stop)


def test_plans_with_spans_are_saved_and_differ_from_others() -> None:
    two_way = [{"length": 64, "two_way": [[6, 50], [50, 52]]}, 9]
    plan = distca.plan([two_way, [20]], **FINE)
    again = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again.fingerprint == plan.fingerprint
    joined = distca.plan([[{"length": 64, "two_way": [[6, 52]]}, 9], [20]], **FINE)
    assert len({p.fingerprint for p in (plan, joined, distca.plan([[64, 9], [20]], **FINE))}) == 3
    edited = plan.to_json()
    edited["two_way"][0][2] = 51
    with pytest.raises(ValueError, match=r"span \[50, 52\): it overlaps the one before, \[6, 51\)"):
        Plan.from_json(edited)


@pytest.mark.parametrize(
    "placer",
    ["balanced", "given", "head-tail", "per-document", "variable-length", "karmarkar-karp"],
)
def test_placers_keep_spans(placer: str) -> None:
    given = Placement.from_ranks([[{"length": 64, "two_way": [[6, 50]]}, 30], [20, 9], [4], [4]])
    placed = distca.place(given, placer=placer, **FINE)
    assert (placed.two_way.start.tolist(), placed.two_way.stop.tolist()) == ([6], [50])
    assert distca.place(given, 2, placer=placer, **FINE).two_way.stop.tolist() == [50]


def test_stages_keep_spans() -> None:
    stages = [Placement.from_ranks([[5, {"length": 9, "two_way": [[n, 7]]}]]) for n in (2, 3)]
    pool = pool_placements([stages[0], None, stages[1]], 1)
    assert pool.two_way.document.tolist() == [1, 3]
    assert pool.two_way.start.tolist() == [2, 3]


SPANS: list[tuple[Any, str]] = [
    ([[2, 6], [5, 9]], r"span \[5, 9\): it overlaps the one before, \[2, 6\)"),
    ([[6, 2]], r"span \[6, 2\): it must start before it stops, within .* \[0, 10\)"),
    ([[4, 4]], r"span \[4, 4\): it must start before it stops"),
    ([[-1, 4]], r"span \[-1, 4\): it must"),
    ([[4, 11]], r"span \[4, 11\): it must .* own tokens \[0, 10\)"),
    ([4, 6], "must be a list of spans"),
    ("ab", "must be a list of spans"),
    ([[1, 2, 3]], "must be a list of spans"),
    ([[1, 2.5]], "must be a whole number"),
]  # fmt: skip


@pytest.mark.parametrize(("spans", "message"), SPANS, ids=str)
def test_wrong_spans_are_refused(spans: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        distca.plan([[3, {"length": 10, "two_way": spans}]], **FINE)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("mask", ["full", "chunk:8"])
def test_masks_without_two_way_spans_are_refused(mask: str) -> None:
    documents = [[3, {"length": 10, "two_way": [[2, 6]]}]]
    for use in (distca.plan, lambda d, **options: distca.place(Placement.from_ranks(d), **options)):
        with pytest.raises(ValueError, match=rf"document 1 has two-way spans and mask {mask}: "):
            use(documents, mask=mask, **FINE)


def test_a_prefix_must_not_end_inside_a_span() -> None:
    parent = {"length": 20, "two_way": [[4, 10]]}
    for prefix in (3, 4, 10, 11):
        distca.plan([[parent, {"length": 5, "parent": 0, "prefix": prefix}]], **FINE)
    inside = "has a prefix of 7 tokens, which ends inside the two-way span"
    with pytest.raises(ValueError, match=inside):
        distca.plan([[parent, {"length": 5, "parent": 0, "prefix": 7}]], **FINE)
    between = {"length": 5, "parent": 0, "prefix": 10}  # the span belongs to the grandparent
    with pytest.raises(ValueError, match=rf"document 2 {inside} \[4, 10\) of document 0"):
        distca.plan([[parent, between, {"length": 5, "parent": 1, "prefix": 7}]], **FINE)


def test_shards_of_a_document_say_the_same_spans() -> None:
    first, second = ({"document": 0, "start": a, "stop": a + 8} for a in (0, 8))
    spans = {"two_way": [[4, 12]]}
    plan = distca.plan([[first | spans], [second | spans]], **FINE)
    assert plan.placement.two_way.stop.tolist() == [12]
    with pytest.raises(ValueError, match=r"another shard of the same document has .* two_way"):
        distca.plan([[first | spans], [second]], **FINE)
