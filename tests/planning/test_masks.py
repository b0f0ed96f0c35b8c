"""Keys and pairs of a mask against the dense boolean matrix."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning.oracles import dense_mask
from strategies import MASKS

from distca.planning.document_masks import DocumentMasks
from distca.planning.masks import Mask, first_key, last_key, pairs, reach_of
from distca.planning.spans import as_ints
from distca.planning.two_way import TwoWaySpans


@given(
    st.data(),
    st.sampled_from([*MASKS, "window:2", "window:30", "chunk:1", "chunk:10", "band:2", "band:59"]),
    st.integers(1, 60),
)
def test_pairs_and_keys_are_those_of_the_dense_mask(
    data: st.DataObject, mask: str, length: int
) -> None:
    start = data.draw(st.integers(0, length - 1))
    stop = data.draw(st.integers(start + 1, length))
    seen = dense_mask(mask, length)[start:stop]
    needed = np.flatnonzero(seen.any(axis=0)).tolist()
    a, b, n = as_ints([start]), as_ints([stop]), as_ints([length])
    reach = reach_of(mask, 1)
    assert pairs(a, b, n, reach).tolist() == [seen.sum()]
    keys = range(int(first_key(a, reach)[0]), int(last_key(b, n, reach)[0]))
    assert list(keys) == needed
    documents = DocumentMasks(n, reach, TwoWaySpans.none())
    zero = as_ints([0])
    assert documents.pairs(zero, a, b).tolist() == [seen.sum()]
    keys = range(int(documents.first_key(zero, a)[0]), int(documents.last_key(zero, b)[0]))
    assert list(keys) == needed


def test_pairs_by_hand() -> None:
    start, stop, length = (
        as_ints([0, 3, 0, 2, 4]),
        as_ints([5, 5, 5, 6, 6]),
        as_ints([5, 5, 5, 6, 6]),
    )
    reach = reach_of(["causal", "causal", "full", "window:3", "window:1"], 5)
    # 1+2+3+4+5; 4+5; 5x5; four rows of 3; two rows of 1.
    assert pairs(start, stop, length, reach).tolist() == [15, 9, 25, 12, 2]


def test_long_documents_do_not_overflow() -> None:
    length = as_ints([1 << 24])
    assert pairs(as_ints([0]), length, length, reach_of("causal", 1)).tolist() == [
        (1 << 23) * ((1 << 24) + 1)
    ]


@pytest.mark.parametrize("text", MASKS)
def test_a_mask_prints_what_it_parses(text: str) -> None:
    assert str(Mask.parse(text)) == text
    assert Mask.parse(Mask.parse(text)) == Mask.parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Causal",
        "window",
        "window:",
        "window:0",
        "window:-4",
        "window:4.5",
        "window:x",
        "chunk:0",
        "band:0",
    ],
)
def test_an_unknown_mask_is_refused(text: str) -> None:
    with pytest.raises(
        ValueError, match=r"^mask .* is unknown: use causal, full, window:N, chunk:N or band:N"
    ):
        Mask.parse(text)


def test_masks_are_one_for_all_or_one_for_each() -> None:
    assert reach_of("window:9", 3).tolist() == [9, 9, 9]
    assert reach_of([Mask(4), "window:5"], 2).tolist() == [4, 5]
    with pytest.raises(ValueError, match="2 masks for 3 documents"):
        reach_of(["causal", "full"], 3)
