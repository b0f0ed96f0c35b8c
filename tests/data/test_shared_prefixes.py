"""Rows that begin alike are packed such that each can be read back, and what they share is once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distca.data.documents import IGNORE
from distca.data.shared_prefixes import pack_rows
from distca.planning.placement import Placement

ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=10)


@given(ROWS, st.integers(0, 12))
def test_every_row_is_found_again(rows: list[list[int]], prompt: int) -> None:
    labels = [[IGNORE] * min(prompt, len(row)) + row[prompt:] for row in rows]
    packed = pack_rows(rows, labels)
    placement = Placement.from_ranks([packed.documents])
    assert placement.tokens.tolist() == [len(packed.tokens)]
    assert packed.num_saved == sum(map(len, rows)) - len(packed.tokens)
    for row, label, places in zip(rows, labels, packed.places, strict=True):
        assert packed.tokens[places].tolist() == row
        assert packed.positions[places].tolist() == list(range(len(row)))
        # Each target is predicted once, from the token before it in the row.
        targets = np.array(label[1:])
        follows = places[1:] == places[:-1] + 1
        assert follows[targets != IGNORE].all()
        assert (
            packed.labels[places[1:]][targets != IGNORE].tolist()
            == targets[targets != IGNORE].tolist()
        )
    wanted = sum(target != IGNORE for label in labels for target in label[1:])
    assert np.count_nonzero(packed.labels != IGNORE) == wanted


def test_a_prompt_is_stored_once_but_for_its_last_token() -> None:
    prompt = list(range(100))
    rows = [[*prompt, 200 + number, 300] for number in range(8)]
    packed = pack_rows(rows, [[IGNORE] * 100 + row[100:] for row in rows])
    assert len(packed.tokens) == 99 + 8 * 3
    assert packed.num_saved == 7 * 99


def test_turns_share_what_came_before() -> None:
    """A conversation that branches twice: each turn is stored once."""
    rows = [[1] * 10 + [2] * 10 + [3], [1] * 10 + [2] * 10 + [4], [1] * 10 + [5] * 4]
    packed = pack_rows(rows)
    assert packed.num_saved == 19 + 9


@pytest.mark.parametrize(
    ("rows", "labels", "words"),
    [
        ([], None, "there are no rows"),
        ([[1], []], None, "one has no tokens"),
        ([[1, 2]], [[1]], "differ in length"),
    ],
)
def test_mistakes(rows: list[list[int]], labels: list[list[int]] | None, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        pack_rows(rows, labels)
