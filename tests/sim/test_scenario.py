"""The same batches for every strategy, and strategies that cannot be."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sim.tiny import MODEL, machines

from distca.pipeline.mesh import MeshShape
from distca.planning.spans import as_ints
from distca.sim.scenario import Scenario, Strategy


def scenario(**changes: Any) -> Scenario:
    given = {"model": MODEL, "cluster": machines("none", 2), "context": 10, "sequences": 2}
    return Scenario(**{**given, **changes})


def lists(found: Scenario, count: int) -> list[list[list[int]]]:
    return [[sequence.tolist() for sequence in batch] for batch in found.batches(count)]


def test_what_is_left_of_a_document_begins_the_next_sequence() -> None:
    found = scenario(lengths=as_ints([4, 9, 7, 25]))
    assert lists(found, 2) == [[[4, 6], [3, 7]], [[10], [10]]]


@given(st.lists(st.integers(1, 30), min_size=1, max_size=30), st.integers(1, 12), st.integers(1, 3))
def test_sequences_are_full_and_documents_keep_their_order(
    lengths: list[int], context: int, sequences: int
) -> None:
    found = scenario(lengths=as_ints(lengths), context=context, sequences=sequences)
    count = sum(lengths) // found.tokens
    if not count:
        return
    batches = lists(found, count)
    assert [len(batch) for batch in batches] == [sequences] * count
    assert {sum(sequence) for batch in batches for sequence in batch} == {context}
    # Borders of documents are where they were, and there are others only between sequences.
    pieces = [n for batch in batches for sequence in batch for n in sequence]
    ends, needed = np.cumsum(pieces).tolist(), found.tokens * count
    borders = {end for end in np.cumsum(lengths).tolist() if end <= needed}
    assert set(ends) == borders | set(range(context, needed + 1, context))


@pytest.mark.parametrize("lengths", ["pretrain", "prolong", "fixed:7", "lognormal:50:1"])
def test_sequences_of_drawn_documents_are_full(lengths: str) -> None:
    found = scenario(lengths=lengths, context=1000, sequences=3)
    sums = [sum(sequence) for batch in lists(found, 4) for sequence in batch]
    assert sums == [1000] * 12


def test_more_batches_begin_with_the_same_ones() -> None:
    found = scenario(lengths="pretrain", context=1000)
    assert lists(found, 5)[:2] == lists(found, 2)


def test_the_seed_draws_the_documents() -> None:
    one, again, other = (scenario(lengths="pretrain", context=1000, seed=s) for s in (1, 1, 2))
    assert lists(one, 1) == lists(again, 1) != lists(other, 1)


def test_too_few_documents_are_refused() -> None:
    found = scenario(lengths=as_ints([30, 20]))
    with pytest.raises(ValueError, match="50 tokens of documents for 3 batches of 20: ") as refused:
        next(found.batches(3))
    assert str(refused.value).endswith("more documents, or ask for fewer batches or sequences")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context": 0}, "context = 0: give 1 or more"),
        ({"sequences": 0}, "sequences = 0: give 1 or more"),
    ],
)
def test_scenarios_without_tokens_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scenario(**changes)


@pytest.mark.parametrize(
    ("policy", "parallel", "message"),
    [
        ("zigzag", MeshShape(), "policy 'zigzag' is unknown: choose one of distca, coloc"),
        ("wlb", MeshShape(servers=1), "policy wlb has no dedicated servers: leave them out"),
        ("colocated", MeshShape(cp=2), "policy colocated with cp = 2: every sequence stays on one"),
        ("kk", MeshShape(cp=2), "policy kk with cp = 2: every sequence stays on one worker"),
    ],
)
def test_ways_that_cannot_be_are_refused(policy: str, parallel: MeshShape, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Strategy(policy, parallel)


def test_a_way_says_what_it_is() -> None:
    strategy = Strategy(
        "distca", MeshShape(pp=2, dp=4, servers=2), micro_batches=8, ping_pong=False
    )
    assert strategy.name == "distca, given, 2 servers, no ping-pong"
    assert strategy.sizes == "pp 2 x dp 4 x 8 micro-batches"
    assert Strategy("wlb", MeshShape()).name == "wlb"
    assert Strategy("wlb", MeshShape()).sizes == "1 GPU"
