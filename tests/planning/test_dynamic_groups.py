"""Dynamic context parallelism: groups by length, packed to even time."""

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import SHAPE

import distca
from distca.planning.options import PlanOptions
from distca.planning.placement import Placement
from distca.planning.placers.dynamic_groups import Groups, assign_groups
from distca.planning.problem import Problem

PAIR_PS = 2 + 5  # forward and backward
documents = st.lists(st.integers(1, 60), min_size=1, max_size=12)
few = settings(max_examples=30)
clusters = st.sampled_from([(1, 1), (2, 2), (4, 2), (4, 4), (6, 2), (6, 6), (8, 8)])


def problem_of(lengths: list[int], workers: int, **options: Any) -> Problem:
    options = {"model": SHAPE, "cost": "pairs", "tolerance": 0.0, **options}
    return PlanOptions(**options).problem(Placement.in_order(np.array(lengths), workers))


def placed(lengths: list[int], workers: int, **options: Any) -> Placement:
    options = {"model": SHAPE, "cost": "pairs", "tolerance": 0.0, **options}
    return distca.place(lengths, workers, placer="dynamic-groups", **options)


def work_of(lengths: list[int]) -> list[int]:
    return [PAIR_PS * n * (n + 1) // 2 for n in lengths]


def busiest(work: list[int], first: Any, size: Any, workers: int) -> float:
    """The work of the busiest worker, one worker and one document after the other."""
    load = [0.0] * workers
    for document, start, width in zip(work, first, size, strict=True):
        for worker in range(start, start + width):
            load[worker] += document / width
    return max(load)


@few
@given(documents, clusters)
def test_groups_are_powers_of_two_that_lie_inside_each_other(
    lengths: list[int], cluster: tuple[int, int]
) -> None:
    workers, cp = cluster
    found = assign_groups(problem_of(lengths, workers, cp=cp))
    spans = {(int(f), int(f + s)) for f, s in zip(found.first, found.size, strict=True)}
    for start, stop in spans:
        size = stop - start
        assert size & (size - 1) == 0
        assert cp % size == 0
        assert start % size == 0
        assert stop <= workers
    for (a, b), (c, d) in product(spans, spans):
        assert b <= c or d <= a or (a <= c and d <= b) or (c <= a and b <= d)


@few
@given(documents, clusters)
def test_every_token_lies_in_the_group_of_its_document(
    lengths: list[int], cluster: tuple[int, int]
) -> None:
    workers, cp = cluster
    found = assign_groups(problem_of(lengths, workers, cp=cp))
    placement = placed(lengths, workers, cp=cp)
    tokens = {
        (d, t)
        for d, start, stop in zip(
            placement.document.tolist(), placement.start.tolist(), placement.stop.tolist(),
            strict=True,
        )
        for t in range(start, stop)
    }  # fmt: skip
    assert len(tokens) == sum(lengths) == int(placement.tokens.sum())
    for document, (start, size) in enumerate(zip(found.first, found.size, strict=True)):
        on = set(placement.worker[placement.document == document].tolist())
        assert on <= set(range(start, start + size))


@few
@given(documents, clusters)
def test_the_busiest_worker_has_what_is_said_and_at_most_the_mean_and_one_piece(
    lengths: list[int], cluster: tuple[int, int]
) -> None:
    workers, cp = cluster
    found, work = assign_groups(problem_of(lengths, workers, cp=cp)), work_of(lengths)
    said = busiest(work, found.first.tolist(), found.size.tolist(), workers)
    assert said <= found.most_ps <= said + len(lengths)
    pieces = [one / size for one, size in zip(work, found.size.tolist(), strict=True)]
    assert said <= sum(work) / workers + max(pieces) + len(lengths)


def longest_first(work: list[int], workers: int) -> int:
    load = [0] * workers
    for one in sorted(work, reverse=True):
        load[load.index(min(load))] += one
    return max(load)


@few
@given(documents, clusters)
def test_it_is_never_worse_than_whole_documents_longest_first(
    lengths: list[int], cluster: tuple[int, int]
) -> None:
    workers, cp = cluster
    found = assign_groups(problem_of(lengths, workers, cp=cp))
    assert found.most_ps <= longest_first(work_of(lengths), workers)


def best_of_all(work: list[int], workers: int, sizes: list[int]) -> float:
    """Tries every group of every document."""
    groups = [(start, size) for size in sizes for start in range(0, workers, size)]
    return min(
        busiest(work, *zip(*chosen, strict=True), workers)
        for chosen in product(groups, repeat=len(work))
    )


@few
@given(st.lists(st.integers(1, 60), min_size=1, max_size=4))
def test_it_is_within_a_third_of_the_best_of_all_groups(lengths: list[int]) -> None:
    work = work_of(lengths)
    found = assign_groups(problem_of(lengths, 4, cp=4))
    assert found.most_ps <= 4 / 3 * best_of_all(work, 4, [1, 2, 4]) + len(lengths)


def test_the_smallest_groups_within_the_tolerance_are_taken() -> None:
    """Eight equal documents on eight workers need no groups; one alone needs all workers."""
    even = assign_groups(problem_of([40] * 8, 8, cp=8, tolerance=0.02))
    assert even.size.tolist() == [1] * 8
    alone = assign_groups(problem_of([40], 8, cp=8, tolerance=0.02))
    assert (alone.size.tolist(), alone.first.tolist()) == ([8], [0])


def test_a_long_document_gets_a_group_and_short_ones_fill_up() -> None:
    """820 pairs of one document; 4 x 210 of others: 410 on each of the first two workers."""
    found: Groups = assign_groups(problem_of([40, *[20] * 4], 4, cp=4, tolerance=0.03))
    assert found.size.tolist() == [2, 1, 1, 1, 1]
    assert found.first.tolist()[0] == 0
    assert sorted(found.first.tolist()[1:]) == [2, 2, 3, 3]


@few
@given(documents, st.sampled_from([2, 4]))
def test_workers_keep_the_limit_of_tokens(lengths: list[int], workers: int) -> None:
    """Twice the mean number of tokens and one per document are always enough."""
    limit = 2 * -(-sum(lengths) // workers) + len(lengths)
    assert placed(lengths, workers, cp=workers, max_tokens=limit).tokens.max() <= limit


def test_a_limit_that_cannot_be_kept_is_refused() -> None:
    with pytest.raises(ValueError, match=r"has 15 tokens, but max_tokens is 10, and no other"):
        placed([30], 2, cp=2, max_tokens=10)
