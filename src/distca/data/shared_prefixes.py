"""Rows of tokens that begin alike, packed such that what they share is stored once.

GRPO, agents and tree search train many continuations of one prompt. Sorted rows that share the most
tokens are neighbours, so each row continues the one before it: a document whose parent is the row
before, with the tokens that both begin with as its prefix (``planning.prefixes``).

A token predicts the next one. The last token before two rows differ predicts two different ones, so
it is stored once for each row; and so is every token whose prediction is in the loss of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from distca.data.documents import IGNORE, Tokens

Continued = dict[str, int]  # length, parent and prefix, as ``distca.plan`` takes a document
Row = Sequence[int] | npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class PackedRows:
    """Rows as documents that continue each other, in one sequence of T tokens."""

    tokens: Tokens  # [T]
    positions: Tokens  # [T] of each token in its row
    labels: Tokens  # [T] those of the rows; a document's first token has none
    documents: tuple[int | Continued, ...]  # in order, as ``distca.plan`` takes those of a rank
    places: tuple[Tokens, ...]  # of each row: where its tokens are in the sequence

    @property
    def num_saved(self) -> int:
        """The number of tokens that the rows have more than the sequence."""
        return sum(map(len, self.places)) - len(self.tokens)


def pack_rows(
    rows: Sequence[Row], labels: Sequence[Row] | None = None, *, share: bool = True
) -> PackedRows:
    """Packs rows of tokens.

    labels: of each token whether it is to be predicted (its id) or not (-100), as in transformers:
        ``labels[i]`` is predicted from the token before. By default, no token is.
    share: whether rows share what they begin with; otherwise each is a document of its own.
    """
    arrays = [np.asarray(row, dtype=np.int64).ravel() for row in rows]
    targets = [np.full_like(row, IGNORE) for row in arrays]
    if labels is not None:
        targets = [np.asarray(label, dtype=np.int64).ravel() for label in labels]
    if not arrays or min(map(len, arrays)) == 0:
        raise ValueError("there are no rows, or one has no tokens: give at least one token in each")
    if [len(row) for row in arrays] != [len(label) for label in targets]:
        raise ValueError("rows and labels differ in length: give one label for each token")
    order = sorted(range(len(arrays)), key=lambda number: arrays[number].tolist())
    prefixes = [0] + [
        _num_shared(arrays[before], arrays[row], targets[before], targets[row]) if share else 0
        for before, row in pairwise(order)
    ]
    places: list[Tokens] = [np.zeros(0, np.int64)] * len(arrays)
    documents: list[int | Continued] = []
    count, above = 0, np.zeros(0, np.int64)
    for index, (row, prefix) in enumerate(zip(order, prefixes, strict=True)):
        own = len(arrays[row]) - prefix
        places[row] = above = np.concatenate([above[:prefix], np.arange(count, count + own)])
        continues = {"length": own, "parent": index - 1, "prefix": prefix}
        documents.append(continues if prefix else own)
        count += own
    own_tokens, own_labels, own_positions = [], [], []
    for row, prefix in zip(order, prefixes, strict=True):
        own_tokens.append(arrays[row][prefix:])
        own_positions.append(np.arange(prefix, len(arrays[row])))
        own_labels.append(np.append(IGNORE, targets[row][prefix + 1 :]))
    return PackedRows(
        np.concatenate(own_tokens),
        np.concatenate(own_positions),
        np.concatenate(own_labels),
        tuple(documents),
        tuple(places),
    )


def _num_shared(row: Tokens, other: Tokens, labels: Tokens, other_labels: Tokens) -> int:
    """Returns how many tokens two rows can share: those that are equal and predict nothing."""
    size = min(len(row), len(other))
    differs = row[:size] != other[:size]
    equal = int(np.argmax(differs)) if differs.any() else size
    targets = (labels[1:equal] != IGNORE) | (other_labels[1:equal] != IGNORE)
    return int(np.argmax(targets)) if targets.any() else max(equal - 1, 0)
