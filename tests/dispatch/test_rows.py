"""Rows against plain indices into the blocks joined end to end."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import Draw

from distca.dispatch.rows import Places, Rows, Run
from distca.planning.spans import as_ints, cumulative, expand


def rows_of(indices: Sequence[int], sizes: Sequence[int]) -> Rows:
    """From indices into the joined blocks, each a span of its own."""
    ends = np.cumsum(sizes)
    block = np.searchsorted(ends, as_ints(indices), side="right")
    start = as_ints(indices) - (ends - sizes)[block]
    return Rows.of(block, start, start + 1)


@st.composite
def cases(draw: Draw) -> tuple[list[int], list[int]]:
    """Sizes of blocks, and runs of rows in any order, which blocks may cut; some are repeated."""
    sizes = draw(st.lists(st.integers(0, 9), min_size=1, max_size=5))
    within = st.integers(0, sum(sizes))
    cuts = sorted({0, sum(sizes), *draw(st.sets(within, max_size=6))})
    shuffled = draw(st.permutations([range(a, b) for a, b in pairwise(cuts)]))
    again = draw(st.lists(st.tuples(within, within), max_size=3))
    runs = [*shuffled[: draw(st.integers(0, 6))], *(range(*sorted(ends)) for ends in again)]
    return sizes, [index for run in runs for index in run]


@given(cases(), st.integers(1, 4), st.integers(0, 3))
def test_places_are_those_of_the_indices(
    case: tuple[list[int], list[int]], width: int, gap: int
) -> None:
    """Block 0 is memory 5; the others lie in memory 7, with gaps between them."""
    sizes, indices = case
    starts = cumulative(as_ints(sizes[1:]) * width + gap)[:-1]
    memory, offset, size = rows_of(indices, sizes).places(width, 5, 7, starts)
    found = zip(np.repeat(memory, size).tolist(), expand(offset, size).tolist(), strict=True)
    first = [0, *starts.tolist()]
    rows = [(block, row) for block, count in enumerate(sizes) for row in range(count)]
    expected = [
        (7 if block else 5, first[block] + row * width + unit)
        for block, row in (rows[index] for index in indices)
        for unit in range(width)
    ]
    assert list(found) == expected


@given(cases(), st.data())
def test_rows_are_split_where_a_choice_changes(
    case: tuple[list[int], list[int]], data: st.DataObject
) -> None:
    """The same rows in the same order, each in a part of its run that is chosen if it is."""
    sizes, indices = case
    chosen = sorted(data.draw(st.sets(st.integers(0, sizes[0] - 1)) if sizes[0] else st.just(())))
    rows = rows_of(indices, sizes)
    parts, is_chosen, former = rows.split(rows_of(chosen, sizes).own())
    of_parts = [
        (run, block, row, which)
        for run, which, (block, start, stop) in zip(
            former.tolist(), is_chosen.tolist(), parts.runs, strict=True
        )
        for row in range(start, stop)
    ]
    flat = [
        (run, block, row, block == 0 and row in chosen)
        for run, (block, start, stop) in enumerate(rows.runs)
        for row in range(start, stop)
    ]
    assert of_parts == flat
    own = rows.own()
    assert expand(own.start, own.stop - own.start).tolist() == sorted(
        {row for _, block, row, _ in flat if block == 0}
    )


def test_packed_places_lie_one_after_the_other() -> None:
    packed = Places.packed(2, 10, as_ints([3, 4]))
    assert [column.tolist() for column in packed] == [[2, 2], [10, 13], [3, 4]]
    joined = Places.joined([packed, Places.packed(1, 0, as_ints([5]))])
    assert [column.tolist() for column in joined] == [[2, 2, 1], [10, 13, 0], [3, 4, 5]]
    assert [column.tolist() for column in Places.joined([])] == [[], [], []]


@pytest.mark.parametrize(
    ("indices", "runs"),
    [
        (range(6), [(0, 0, 2), (2, 0, 4)]),
        ([3, 4, 0, 1], [(2, 1, 3), (0, 0, 2)]),
        ([2, 1, 0], [(2, 0, 1), (0, 1, 2), (0, 0, 1)]),
        ([5, 5], [(2, 3, 4), (2, 3, 4)]),
        ([], []),
    ],
    ids=["all", "out of order", "backwards", "twice", "none"],
)
def test_neighbors_of_one_block_are_one_run(indices: Any, runs: list[tuple[int, ...]]) -> None:
    assert rows_of(indices, [2, 0, 4]).runs == tuple(Run(*run) for run in runs)


def test_spans_are_joined_only_where_they_touch() -> None:
    """In order, and within one block; it prints as slices."""
    columns = ([0, 0, 0, 1, 1], [2, 6, 9, 9, 12], [6, 8, 10, 12, 13])
    rows = Rows.of(*map(as_ints, columns))
    assert str(rows) == "0[2:8] 0[9:10] 1[9:13]"
    assert len(rows) == 11


def test_no_rows() -> None:
    rows = rows_of([], [3, 0])
    assert [column.tolist() for column in rows.places(4, 0)] == [[], [], []]
    assert (len(rows), str(rows)) == (0, "")
