"""Attention masks: causal, full, a sliding window, or chunks.

A mask is stored as its *reach*: query i of a document sees min(i + 1, reach) keys, the last of
which is its own. A causal mask has an unlimited reach. A full mask, under which every query sees
the whole document, is written as reach 0. Chunks of c tokens, of which each is causal and sees no
other, are written as reach -c. One integer for each document lets every formula below run over all
tasks at once.
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
    """The mask of a document. Parses from and prints as causal, full, window:N or chunk:N."""

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
        if kind in ("window", "chunk") and size.isdecimal() and 0 < int(size) < CAUSAL:
            return cls(int(size) if kind == "window" else -int(size))
        raise ValueError(
            f"mask {text!r} is unknown: use causal, full, window:N or chunk:N with N >= 1 keys"
        )

    def __str__(self) -> str:
        if self.reach < 0:
            return f"chunk:{-self.reach}"
        return {CAUSAL: "causal", FULL: "full"}.get(self.reach, f"window:{self.reach}")

    def within(self, length: int) -> Mask:
        """Returns the mask for documents up to a length: causal if no window or chunk ends."""
        return Mask(CAUSAL) if abs(self.reach) >= length > 0 else self


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
    first = np.where(reach == FULL, 0, np.maximum(start - reach + 1, 0))
    return np.where(reach < 0, chunk_start(start, reach), first) if np.any(reach < 0) else first


def last_key(stop: Ints, length: Ints, reach: Ints) -> Ints:
    """Returns one past the last key that queries before ``stop`` need."""
    return np.where(reach == FULL, length, stop)


def keys_needed(queries: Span, length: int, reach: int) -> Span:
    """Returns the keys that one span of queries needs, in Python integers."""
    if reach == FULL:
        return 0, length
    if reach < 0:
        return queries[0] // -reach * -reach, queries[1]
    return max(queries[0] - reach + 1, 0), queries[1]


def chunk_start(position: Ints, reach: Ints) -> Ints:
    """Returns where the chunk of a position starts; 0 where the mask has no chunks."""
    size = np.maximum(-reach, 1)
    return np.where(reach < 0, position // size * size, 0)


def _seen_before(position: Ints, reach: Ints) -> Ints:
    """Returns the pairs of all queries before ``position``: a triangle, then a band.

    Chunks have a triangle each.
    """
    triangle = np.minimum(position, reach)
    seen: Ints = triangle * (triangle + 1) // 2 + (position - triangle) * reach
    if not np.any(reach < 0):
        return seen
    size = np.maximum(-reach, 1)
    chunks, rest = np.divmod(position, size)
    chunked = chunks * (size * (size + 1) // 2) + rest * (rest + 1) // 2
    return np.where(reach < 0, chunked, seen)
