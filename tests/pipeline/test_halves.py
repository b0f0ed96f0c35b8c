"""Halves keep every document once and trees together; documents that stay are split per group."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distca.pipeline.halves import Members, groups_then_halves, halves_then_groups
from distca.pipeline.packing import assign_groups

Split = Callable[..., list[Members]]


@st.composite
def trees(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Lengths and prefixes of documents, some of which continue the one before them."""
    lengths, prefixes = [], []
    for number in range(draw(st.integers(8, 40))):
        is_root = number < 8 or draw(st.booleans())
        prefixes.append(0 if is_root else draw(st.integers(1, lengths[-1])))
        lengths.append(prefixes[-1] + draw(st.integers(1, 300)))
    return np.array(lengths), np.array(prefixes)


@pytest.mark.parametrize("split", [halves_then_groups, groups_then_halves])
@given(batch=trees(), dp=st.integers(1, 4), micro_batches=st.integers(1, 3))
def test_every_document_is_in_one_half_with_its_tree(
    split: Split, batch: tuple[np.ndarray, np.ndarray], dp: int, micro_batches: int
) -> None:
    lengths, prefixes = batch
    halves = split(lengths, prefixes, dp, micro_batches, 2)
    assert len(halves) == 2 * micro_batches
    assert all(len(half.document) for half in halves)
    found = np.concatenate([half.document for half in halves])
    assert sorted(found) == [*range(len(lengths))]
    half_of = np.empty(len(lengths), int)
    for number, half in enumerate(halves):
        assert np.all(np.diff(half.document) > 0)  # a prefix follows the document it continues
        half_of[half.document] = number
    assert not np.any((prefixes > 0)[1:] & (np.diff(half_of) != 0))


@given(st.lists(st.integers(1, 300), min_size=2, max_size=40).map(np.array), st.integers(2, 4))
def test_groups_have_the_tokens_of_one_half(lengths: np.ndarray, dp: int) -> None:
    halves = groups_then_halves(lengths, np.zeros_like(lengths), dp, 1, 2)
    tokens = [np.bincount(half.group, lengths[half.document], dp) for half in halves]
    whole = np.bincount(assign_groups(lengths, dp), lengths, dp)
    assert (tokens[0] + tokens[1]).tolist() == whole.tolist()
    longest = np.zeros(dp)
    for half in halves:
        np.maximum.at(longest, half.group, lengths[half.document])
    # As even as whole documents allow: the longest is all that the halves of a group differ by.
    assert np.all(abs(tokens[0] - tokens[1]) <= longest)


def test_groups_of_one_document_each_are_spread_over_the_halves() -> None:
    halves = groups_then_halves(np.full(4, 100), np.zeros(4, int), 4, 1, 2)
    assert sorted(len(half.document) for half in halves) == [2, 2]
    assert sorted(np.concatenate([half.group for half in halves])) == [0, 1, 2, 3]


def test_long_documents_of_all_groups_are_in_the_same_half() -> None:
    """Else, each half takes as long as a long document, instead of one of them."""
    lengths = np.array([900] * 4 + [100] * 4)
    halves = groups_then_halves(lengths, np.zeros_like(lengths), 4, 1, 2)
    assert [lengths[half.document].tolist() for half in halves] == [[100] * 4, [900] * 4]


def test_one_group_splits_attention_as_well() -> None:
    """Its documents span its workers, which have equal tokens in any half."""
    lengths = np.array([900, 500, 400, 300, 300, 200, 200])
    sides = (lengths, np.zeros_like(lengths), 1, 1, 2)
    for one, other in zip(groups_then_halves(*sides), halves_then_groups(*sides), strict=True):
        assert one.document.tolist() == other.document.tolist()
