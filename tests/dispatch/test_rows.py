"""Rows against plain indices into the pieces joined end to end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import Draw
from torch import Tensor

from distca.dispatch.rows import Rows, Run
from distca.planning.spans import as_ints


@dataclass(frozen=True)
class Case:
    """Some rows of some pieces; the pieces may be parts of a wider tensor."""

    sizes: list[int]
    indices: list[int]
    wide: bool

    @property
    def rows(self) -> Rows:
        return rows_of(self.indices, self.sizes)

    def pieces(self) -> list[Tensor]:
        return [random_rows(size, self.wide) for size in self.sizes]

    def values(self) -> Tensor:
        return random_rows(len(self.indices), self.wide)


def rows_of(indices: Sequence[int], sizes: Sequence[int]) -> Rows:
    """From indices into the joined pieces, each a span of its own."""
    ends = np.cumsum(sizes)
    piece = np.searchsorted(ends, as_ints(indices), side="right")
    start = as_ints(indices) - (ends - sizes)[piece]
    return Rows.of(piece, start, start + 1)


def random_rows(count: int, wide: bool) -> Tensor:
    """[count, 2, 3]."""
    if wide:
        return torch.randn(count, 4, 6, dtype=torch.float64)[:, 1:3, ::2]
    return torch.randn(count, 2, 3, dtype=torch.float64)


@st.composite
def cases(draw: Draw, repeats: bool = True) -> Case:
    """Runs of rows in any order, which pieces may cut; some pieces are empty."""
    sizes = draw(st.lists(st.integers(0, 9), min_size=1, max_size=5))
    within = st.integers(0, sum(sizes))
    cuts = sorted({0, sum(sizes), *draw(st.sets(within, max_size=6))})
    shuffled = draw(st.permutations([range(a, b) for a, b in pairwise(cuts)]))
    runs = shuffled[: draw(st.integers(0, len(shuffled)))]
    if repeats:
        again = draw(st.lists(st.tuples(within, within), max_size=3))
        runs += [range(*sorted(ends)) for ends in again]
    return Case(sizes, [index for run in runs for index in run], draw(st.booleans()))


@given(cases())
def test_rows_are_taken_as_indices_would(case: Case) -> None:
    pieces, out = case.pieces(), case.values()
    expected = torch.cat(pieces)[case.indices]
    assert torch.equal(case.rows.take(pieces), expected)
    assert case.rows.take(pieces, out=out).data_ptr() == out.data_ptr()
    assert torch.equal(out, expected)


@given(cases(repeats=False))
def test_what_is_put_is_there_and_nothing_else_changes(case: Case) -> None:
    pieces, values = case.pieces(), case.values()
    expected = torch.cat(pieces)
    expected[case.indices] = values
    case.rows.put(values, pieces)
    assert torch.equal(torch.cat(pieces), expected)
    assert torch.equal(case.rows.take(pieces), values)


@given(cases())
def test_rows_named_twice_are_added_twice(case: Case) -> None:
    pieces, values = case.pieces(), case.values()
    expected = torch.cat(pieces).numpy()
    np.add.at(expected, case.indices, values.numpy())
    case.rows.add(values, pieces)
    assert np.array_equal(torch.cat(pieces).numpy(), expected)


@given(st.one_of(cases(), cases(repeats=False)))
def test_disjoint_is_that_no_row_is_named_twice(case: Case) -> None:
    assert case.rows.disjoint == (len(set(case.indices)) == len(case.indices))


@pytest.mark.parametrize("wide", [False, True])
def test_a_single_run_is_a_view(wide: bool) -> None:
    pieces = [random_rows(4, wide), random_rows(6, wide)]
    taken = rows_of(range(5, 9), [4, 6]).take(pieces)
    assert taken.data_ptr() == pieces[1][1].data_ptr()
    pieces[1][1:5] = 7
    assert bool((taken == 7).all())


def test_several_runs_are_a_copy() -> None:
    piece = torch.zeros(4, 2)
    taken = rows_of([0, 2, 3], [4]).take([piece])
    piece.fill_(7)
    assert not taken.any()


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
def test_neighbours_of_one_piece_are_one_run(indices: Any, runs: list[tuple[int, ...]]) -> None:
    assert rows_of(indices, [2, 0, 4]).runs == tuple(Run(*run) for run in runs)


def test_spans_are_joined_only_where_they_touch() -> None:
    """In order, and within one piece; it prints as slices."""
    columns = ([0, 0, 0, 1, 1], [2, 6, 9, 9, 12], [6, 8, 10, 12, 13])
    rows = Rows.of(*map(as_ints, columns))
    assert str(rows) == "0[2:8] 0[9:10] 1[9:13]"
    assert len(rows) == 11


def test_no_rows_move_nothing() -> None:
    pieces, none = [torch.ones(3, 2, 5), torch.ones(0, 2, 5)], torch.empty(0, 2, 5)
    rows = rows_of([], [3, 0])
    assert rows.take(pieces).shape == (0, 2, 5)
    assert rows.take(pieces, out=none) is none
    rows.put(none, pieces)
    rows.add(none, pieces)
    assert bool((pieces[0] == 1).all())
    assert rows.disjoint
    assert (len(rows), str(rows)) == (0, "")
