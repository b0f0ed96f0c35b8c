"""Span algebra against sets of tokens."""

from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distca.planning.spans import (
    Spans,
    as_ints,
    covered,
    cumulative,
    expand,
    gaps,
    meet,
    overlaps,
    union,
    with_span,
)

GROUPS = st.integers(0, 3)
SPANS = st.lists(
    st.tuples(GROUPS, st.integers(0, 30), st.integers(1, 12)).map(
        lambda span: (span[0], span[1], span[1] + span[2])
    ),
    max_size=12,
)


def to_spans(rows: list[tuple[int, int, int]]) -> Spans:
    return Spans(*as_ints(rows).reshape(-1, 3).T)


def to_tokens(spans: Spans) -> set[tuple[int, int]]:
    rows = zip(*(column.tolist() for column in spans), strict=True)
    return {(group, token) for group, start, stop in rows for token in range(start, stop)}


def test_expand_and_cumulative_by_hand() -> None:
    assert expand(as_ints([5, 0]), as_ints([2, 3])).tolist() == [5, 6, 0, 1, 2]
    assert expand(as_ints([7, 1, 4]), as_ints([0, 2, 0])).tolist() == [1, 2]
    assert expand(as_ints([]), as_ints([])).tolist() == []
    assert cumulative(as_ints([3, 4])).tolist() == [0, 3, 7]
    assert cumulative(as_ints([])).tolist() == [0]


@given(SPANS)
def test_expand_lists_every_row(rows: list[tuple[int, int, int]]) -> None:
    spans = to_spans(rows)
    expected = [token for _, start, stop in rows for token in range(start, stop)]
    assert expand(spans.start, spans.stop - spans.start).tolist() == expected


@given(SPANS)
def test_union_holds_the_same_tokens_in_sorted_spans_that_do_not_touch(
    rows: list[tuple[int, int, int]],
) -> None:
    spans = to_spans(rows)
    joined = union(spans)
    assert to_tokens(joined) == to_tokens(spans)
    result = list(zip(*(column.tolist() for column in joined), strict=True))
    assert result == sorted(result)
    for (group, _, stop), (next_group, start, _) in pairwise(result):
        assert group < next_group or stop < start


def test_union_joins_what_touches_but_not_across_groups() -> None:
    joined = union(to_spans([(1, 4, 9), (0, 0, 4), (0, 4, 6), (1, 9, 10)]))
    assert [column.tolist() for column in joined] == [[0, 1], [0, 4], [6, 10]]


@given(SPANS, SPANS)
def test_overlaps_meet_where_the_tokens_do(
    left: list[tuple[int, int, int]], right: list[tuple[int, int, int]]
) -> None:
    apart = union(to_spans(right))
    found = overlaps(to_spans(left), apart)
    expected = defaultdict(set)
    for i, (group, start, stop) in enumerate(left):
        for j in range(len(apart.group)):
            for token in range(start, stop):
                if group == apart.group[j] and apart.start[j] <= token < apart.stop[j]:
                    expected[i, j].add(token)
    got = {
        (int(i), int(j)): set(range(start, stop)) for i, j, start, stop in zip(*found, strict=True)
    }
    assert len(got) == len(found.left), "a pair of spans meets once"
    assert got == dict(expected)
    assert np.all(np.diff(found.left) >= 0)


@pytest.mark.parametrize("empty", [0, 1])
def test_overlaps_with_nothing(empty: int) -> None:
    sides = [to_spans([(0, 0, 5)]), to_spans([(0, 0, 5)])]
    sides[empty] = to_spans([])
    assert len(overlaps(*sides).left) == 0


@given(SPANS, SPANS)
def test_covered_adds_up_what_each_other_span_has(
    rows: list[tuple[int, int, int]], others: list[tuple[int, int, int]]
) -> None:
    expected = [
        sum(
            max(0, min(stop, high) - max(start, low))
            for other, low, high in others
            if other == group
        )
        for group, start, stop in rows
    ]
    assert covered(to_spans(rows), to_spans(others)).tolist() == expected


@given(SPANS)
def test_lists_of_spans_agree_with_arrays(rows: list[tuple[int, int, int]]) -> None:
    """Spans that are added one by one to a list give the union, and share the same tokens."""
    spans: list[tuple[int, int]] = []
    for _, start, stop in rows:
        tokens = {token for low, high in spans for token in range(low, high)}
        assert meet(spans, (start, stop)) == bool(tokens & set(range(start, stop)))
        missing = [token for low, high in gaps(spans, (start, stop)) for token in range(low, high)]
        assert missing == sorted(set(range(start, stop)) - tokens)
        spans = with_span(spans, (start, stop))
    joined = union(to_spans([(0, start, stop) for _, start, stop in rows]))
    assert spans == list(zip(joined.start.tolist(), joined.stop.tolist(), strict=True))
