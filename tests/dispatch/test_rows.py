"""Rows against plain indices into the blocks joined end to end."""

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
    """Some rows of some blocks; the blocks may be parts of a wider tensor."""

    sizes: list[int]
    indices: list[int]
    wide: bool

    @property
    def rows(self) -> Rows:
        return rows_of(self.indices, self.sizes)

    def blocks(self) -> list[Tensor]:
        return [random_rows(size, self.wide) for size in self.sizes]

    def values(self) -> Tensor:
        return random_rows(len(self.indices), self.wide)


def rows_of(indices: Sequence[int], sizes: Sequence[int]) -> Rows:
    """From indices into the joined blocks, each a span of its own."""
    ends = np.cumsum(sizes)
    block = np.searchsorted(ends, as_ints(indices), side="right")
    start = as_ints(indices) - (ends - sizes)[block]
    return Rows.of(block, start, start + 1)


def random_rows(count: int, wide: bool) -> Tensor:
    """[count, 2, 3]."""
    if wide:
        return torch.randn(count, 4, 6, dtype=torch.float64)[:, 1:3, ::2]
    return torch.randn(count, 2, 3, dtype=torch.float64)


@st.composite
def cases(draw: Draw, repeats: bool = True) -> Case:
    """Runs of rows in any order, which blocks may cut; some blocks are empty."""
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
    blocks, out = case.blocks(), case.values()
    expected = torch.cat(blocks)[case.indices]
    assert torch.equal(case.rows.take(blocks), expected)
    assert case.rows.take(blocks, out=out).data_ptr() == out.data_ptr()
    assert torch.equal(out, expected)


@given(cases(repeats=False))
def test_what_is_put_is_there_and_nothing_else_changes(case: Case) -> None:
    blocks, values = case.blocks(), case.values()
    expected = torch.cat(blocks)
    expected[case.indices] = values
    case.rows.put(values, blocks)
    assert torch.equal(torch.cat(blocks), expected)
    assert torch.equal(case.rows.take(blocks), values)


@given(cases())
def test_rows_named_twice_are_added_twice(case: Case) -> None:
    blocks, values = case.blocks(), case.values()
    expected = torch.cat(blocks).numpy()
    np.add.at(expected, case.indices, values.numpy())
    case.rows.add(values, blocks)
    assert np.array_equal(torch.cat(blocks).numpy(), expected)


@given(st.one_of(cases(), cases(repeats=False)))
def test_disjoint_is_that_no_row_is_named_twice(case: Case) -> None:
    assert case.rows.disjoint == (len(set(case.indices)) == len(case.indices))


@pytest.mark.parametrize("wide", [False, True])
def test_a_single_run_is_a_view(wide: bool) -> None:
    blocks = [random_rows(4, wide), random_rows(6, wide)]
    taken = rows_of(range(5, 9), [4, 6]).take(blocks)
    assert taken.data_ptr() == blocks[1][1].data_ptr()
    blocks[1][1:5] = 7
    assert bool((taken == 7).all())


def test_several_runs_are_a_copy() -> None:
    block = torch.zeros(4, 2)
    taken = rows_of([0, 2, 3], [4]).take([block])
    block.fill_(7)
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
def test_neighbors_of_one_block_are_one_run(indices: Any, runs: list[tuple[int, ...]]) -> None:
    assert rows_of(indices, [2, 0, 4]).runs == tuple(Run(*run) for run in runs)


def test_spans_are_joined_only_where_they_touch() -> None:
    """In order, and within one block; it prints as slices."""
    columns = ([0, 0, 0, 1, 1], [2, 6, 9, 9, 12], [6, 8, 10, 12, 13])
    rows = Rows.of(*map(as_ints, columns))
    assert str(rows) == "0[2:8] 0[9:10] 1[9:13]"
    assert len(rows) == 11


def test_no_rows_move_nothing() -> None:
    blocks, none = [torch.ones(3, 2, 5), torch.ones(0, 2, 5)], torch.empty(0, 2, 5)
    rows = rows_of([], [3, 0])
    assert rows.take(blocks).shape == (0, 2, 5)
    assert rows.take(blocks, out=none) is none
    rows.put(none, blocks)
    rows.add(none, blocks)
    assert bool((blocks[0] == 1).all())
    assert rows.disjoint
    assert (len(rows), str(rows)) == (0, "")
