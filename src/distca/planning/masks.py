"""Attention masks: causal, full, or a sliding window.

A mask is stored as its *reach*: query i of a document sees min(i + 1, reach) keys, the last of
which is its own. A causal mask has an unlimited reach. A full mask, under which every query sees
the whole document, is written as reach 0. One integer for each document lets every formula below
run over all tasks at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from distca.planning.spans import Ints, Span, as_ints

FULL = 0
CAUSAL = 1 << 40


@dataclass(frozen=True)
class Mask:
    """The mask of a document. Parses from and prints as ``causal``, ``full`` or ``window:N``."""

    reach: int = CAUSAL

    @classmethod
    def parse(cls, text: str | Mask) -> Mask:
        if isinstance(text, Mask):
            return text
        if text == "causal":
            return cls(CAUSAL)
        if text == "full":
            return cls(FULL)
        kind, _, size = text.partition(":") if isinstance(text, str) else ("", "", "")
        if kind == "window" and size.isdecimal() and 0 < int(size) < CAUSAL:
            return cls(int(size))
        raise ValueError(
            f"mask {text!r} is unknown: use causal, full, or window:N with N >= 1 keys"
        )

    def __str__(self) -> str:
        return {CAUSAL: "causal", FULL: "full"}.get(self.reach, f"window:{self.reach}")


def reach_of(mask: str | Mask | Sequence[str | Mask], num_documents: int) -> Ints:
    """Returns one reach per document, from one mask for all documents or one for each."""
    if not isinstance(mask, Sequence) or isinstance(mask, str):
        return np.full(num_documents, Mask.parse(mask).reach, dtype=np.int64)
    if len(mask) != num_documents:
        raise ValueError(
            f"{len(mask)} masks for {num_documents} documents: give one mask for all of them,"
            " or one for each"
        )
    return as_ints([Mask.parse(m).reach for m in mask])


def pairs(start: Ints, stop: Ints, length: Ints, reach: Ints) -> Ints:
    """Returns the query-key pairs of queries [start, stop) of documents of ``length`` tokens."""
    seen = _seen_before(stop, reach) - _seen_before(start, reach)
    return np.where(reach == FULL, (stop - start) * length, seen)


def document_pairs(lengths: Ints, mask: str | Mask) -> int:
    """Returns the query-key pairs of whole documents."""
    reach = reach_of(mask, len(lengths))
    return int(pairs(np.zeros_like(lengths), lengths, lengths, reach).sum())


def first_key(start: Ints, reach: Ints) -> Ints:
    """Returns the first key that queries from ``start`` on need."""
    return np.where(reach == FULL, 0, np.maximum(start - reach + 1, 0))


def last_key(stop: Ints, length: Ints, reach: Ints) -> Ints:
    """Returns one past the last key that queries before ``stop`` need."""
    return np.where(reach == FULL, length, stop)


def keys_needed(queries: Span, length: int, reach: int) -> Span:
    """Returns the keys that one span of queries needs, in Python integers."""
    if reach == FULL:
        return 0, length
    return max(queries[0] - reach + 1, 0), queries[1]


def _seen_before(position: Ints, reach: Ints) -> Ints:
    """Returns the pairs of all queries before ``position``: a triangle, then a band."""
    triangle = np.minimum(position, reach)
    seen: Ints = triangle * (triangle + 1) // 2 + (position - triangle) * reach
    return seen
