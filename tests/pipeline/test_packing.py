"""Packing keeps every document exactly once, in sets of about equal size."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distca.pipeline.packing import FILLER, pack_in_groups, pad_to_multiple, split
from distca.planning.placement import Placement

some_lengths = st.lists(st.integers(1, 300), min_size=1, max_size=40).map(np.array)


@given(some_lengths, st.integers(1, 4))
def test_every_document_is_in_one_set(lengths: np.ndarray, count: int) -> None:
    if len(lengths) < count:
        with pytest.raises(ValueError, match="cannot be split into"):
            split(lengths, count)
        return
    sets = split(lengths, count)
    assert len(sets) == count
    assert all(len(members) for members in sets)
    assert sorted(np.concatenate(sets)) == list(range(len(lengths)))


def test_halves_are_about_even_in_tokens_and_attention() -> None:
    lengths = np.concatenate([[4096, 3000, 2500], np.full(60, 150)])
    ping, pong = (lengths[members] for members in split(lengths, 2))
    assert ping.sum() == pytest.approx(pong.sum(), rel=0.15)
    assert (ping**2).sum() == pytest.approx((pong**2).sum(), rel=0.15)


@given(some_lengths, st.integers(1, 3), st.integers(1, 3), st.sampled_from([1, 2, 4, 7]))
def test_documents_stay_within_their_group(
    lengths: np.ndarray, dp: int, cp: int, multiple: int
) -> None:
    placement = pack_in_groups(lengths, dp, cp, multiple=multiple)
    assert placement.num_workers == dp * cp
    assert not np.any(placement.tokens % multiple)
    assert placement.lengths[: len(lengths)].tolist() == lengths.tolist()
    assert np.all(placement.lengths[len(lengths) :] <= FILLER)
    filler = int(placement.lengths[len(lengths) :].sum())
    assert filler < multiple * dp * cp
    for document in range(len(lengths)):
        workers = placement.worker[placement.document == document]
        assert len({int(w) // cp for w in workers}) == 1
    in_group = placement.tokens.reshape(dp, cp)
    assert np.all(in_group.max(1) - in_group[:, :1].max(1) <= 0)  # filled from the first on


@given(some_lengths, st.integers(1, 3), st.integers(1, 3))
def test_tokens_of_a_group_lie_one_after_the_other(lengths: np.ndarray, dp: int, cp: int) -> None:
    placement = pack_in_groups(lengths, dp, cp)
    group = {
        int(d): int(w) // cp for d, w in zip(placement.document, placement.worker, strict=True)
    }
    expected: list[tuple[int, int, int]] = []  # worker, document and position of every token
    for number in range(dp):
        tokens = [(d, p) for d in sorted(group) if group[d] == number for p in range(lengths[d])]
        per_worker = max(-(-len(tokens) // cp), 1)
        expected += [(number * cp + row // per_worker, *t) for row, t in enumerate(tokens)]
    placed = [
        (worker, document, position)
        for worker, document, start, stop in placement.shards()
        for position in range(start, stop)
    ]
    assert placed == expected


def test_a_long_row_of_fillers_is_cut_into_tiles() -> None:
    placement = pad_to_multiple(Placement.from_ranks([[10], []]), 300)
    assert placement.tokens.tolist() == [300, 0]
    assert placement.lengths.tolist() == [10, 128, 128, 34]


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_nonsense_is_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="each must be 1 or more"):
        pack_in_groups(np.array([5]), sizes[0], sizes[1], multiple=sizes[2])
