"""Karmarkar-Karp: against the best of all partitions, and what a worker can hold."""

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import OWN_BYTES, SHAPE

import distca
from distca.planning.models import model_shape
from distca.planning.placement import Placement
from distca.planning.placers import karmarkar_karp
from distca.planning.placers.karmarkar_karp import partition

costs = st.lists(st.integers(1, 60), max_size=7)


def placed(lengths: list[int], workers: int, **options: Any) -> Placement:
    options = {"model": SHAPE, "cost": "pairs", **options}
    return distca.place(lengths, workers, placer="karmarkar-karp", **options)


def largest_sum(cost: list[int], sets: list[list[int]]) -> int:
    return max(sum(cost[number] for number in members) for members in sets)


def best_largest_sum(cost: list[int], num_sets: int) -> int:
    return min(
        max(
            sum(c for c, one in zip(cost, chosen, strict=True) if one == s) for s in range(num_sets)
        )
        for chosen in product(range(num_sets), repeat=len(cost))
    )


def test_differences_cancel() -> None:
    """8 - 7 = 1, 6 - 5 = 1, 4 - 1 = 3, 3 - 1 = 2: the sums of the sets differ by 2."""
    assert partition([8, 7, 6, 5, 4], 2) == [[1, 3, 4], [0, 2]]


@given(costs, st.integers(1, 4))
def test_a_partition_is_within_the_known_bound_of_the_best(cost: list[int], num_sets: int) -> None:
    """At most 4/3 - 1 / (3 sets) of the best, proven by Michiels, Korst and Aarts."""
    sets = partition(cost, num_sets)
    assert len(sets) == num_sets
    assert sorted(number for members in sets for number in members) == list(range(len(cost)))
    bound = 4 / 3 - 1 / (3 * num_sets)
    assert largest_sum(cost, sets) <= bound * best_largest_sum(cost, num_sets) + 1e-9


def test_many_documents_take_work_for_each_set_only(monkeypatch: pytest.MonkeyPatch) -> None:
    combine, touched = karmarkar_karp._combine, []

    def counted(first: Any, second: Any, num_sets: int) -> Any:
        touched.append(len(first) + len(second))
        return combine(first, second, num_sets)

    monkeypatch.setattr(karmarkar_karp, "_combine", counted)
    cost = np.random.default_rng(0).integers(1, 1 << 40, 100_000).tolist()
    sets = partition(cost, 8)
    assert largest_sum(cost, sets) <= 1.0001 * sum(cost) / 8
    assert len(touched) == len(cost) - 1
    assert max(touched) <= 2 * 8


def test_linear_layers_count_as_well_as_pairs() -> None:
    """Tokens decide while documents are short, pairs when they are long."""
    model = {"model": model_shape("llama3-8b"), "cost": "h200"}
    assert placed([64] * 4 + [256], 2, **model).tokens.tolist() == [256, 256]
    long = placed([131072, *[8192] * 48], 2, **model).tokens
    assert sorted(long.tolist())[0] == 131072
    assert max(long) == 48 * 8192


def test_the_time_of_a_token_outside_attention_can_be_given() -> None:
    """Pairs cost 7 ps forward and backward: 3 documents of 2 tokens have 21 each, one of 6 147."""
    assert sorted(placed([6, 2, 2, 2], 2).tokens.tolist()) == [6, 6]
    short = [6, *[2] * 6]
    assert sorted(placed(short, 2).tokens.tolist()) == [6, 12]
    assert sorted(placed(short, 2, token_s=1e-9).tokens.tolist()) == [8, 10]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 5))
def test_documents_stay_whole(lengths: list[int], workers: int) -> None:
    placement = placed(lengths, workers)
    assert sorted(placement.document.tolist()) == list(range(len(lengths)))
    assert placement.start.tolist() == [0] * len(lengths)
    assert placement.num_workers == workers


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(2, 4))
def test_workers_hold_what_they_can(lengths: list[int], workers: int) -> None:
    """Twice the mean number of tokens and the longest document are always enough."""
    limit = 2 * -(-sum(lengths) // workers) + max(lengths)
    placement = placed(lengths, workers, memory_bytes=limit * OWN_BYTES)
    assert placement.tokens.max() <= limit


def test_short_documents_move_where_there_is_room() -> None:
    """By pairs alone, 36 documents of 10 tokens weigh about as much as one of 63."""
    lengths = [63] + [10] * 36
    assert sorted(placed(lengths, 2).tokens.tolist()) == [63, 360]
    for limit in ({"memory_bytes": 250 * OWN_BYTES}, {"max_tokens": 250}):
        assert sorted(placed(lengths, 2, **limit).tokens.tolist()) == [173, 250]


def test_documents_that_fit_nowhere_are_refused() -> None:
    with pytest.raises(ValueError, match=r"worker \d has 60 tokens, but max_tokens is 50, and no"):
        placed([30] * 3, 2, max_tokens=50)
    with pytest.raises(ValueError, match="holds 60 tokens"):
        distca.plan(
            placed([30] * 3, 2, memory_bytes=50 * OWN_BYTES),
            model=SHAPE,
            scheduler="home",
            memory_bytes=50 * OWN_BYTES,
        )
