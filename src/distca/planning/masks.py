"""Attention masks: causal, full, a sliding window, a band, or chunks.

A mask is stored as its *reach*: query i of a document sees min(i + 1, reach) keys, the last of
which is its own. A causal mask has an unlimited reach. A full mask, under which every query sees
the whole document, is written as reach 0. Chunks of c tokens, of which each is causal and sees no
other, are written as reach -c. A band of n, under which a query sees the n keys before and behind
its own, is written as reach BAND + n. One integer for each document lets every formula below run
over all tasks at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from distca.planning.spans import Bools, Ints, Span, as_ints
from distca.schema import shown

FULL = 0
CAUSAL = 1 << 40
BAND = 1 << 41


@dataclass(frozen=True)
class Mask:
    """The mask of a document: causal, full, window:N, chunk:N or band:N, as it is written."""

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
        if kind in ("window", "chunk", "band") and size.isdecimal() and 0 < int(size) < CAUSAL:
            return cls({"window": int(size), "chunk": -int(size), "band": BAND + int(size)}[kind])
        raise ValueError(
            f"mask {shown(text)} is unknown: use causal, full, window:N, chunk:N or band:N with"
            " N >= 1"
        )

    def __str__(self) -> str:
        if self.reach < 0:
            return f"chunk:{-self.reach}"
        if self.reach > BAND:
            return f"band:{self.reach - BAND}"
        return {CAUSAL: "causal", FULL: "full"}.get(self.reach, f"window:{self.reach}")

    def within(self, length: int) -> Mask:
        """Returns a simpler mask if it is the same for documents up to a length."""
        if self.reach > BAND:
            return Mask(FULL) if self.reach - BAND >= length - 1 else self
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
    window = np.where(reach > BAND, reach - BAND + 1, reach)
    seen = _seen_before(stop, window) - _seen_before(start, window)
    if np.any(reach > BAND):  # read backwards, the keys behind a query are a window without its own
        behind = [_seen_before(length - one, window) - (length - one) for one in (start, stop)]
        seen = seen + np.where(reach > BAND, behind[0] - behind[1], 0)
    return np.where(reach == FULL, (stop - start) * length, seen)


def window_pairs(start: Ints, stop: Ints, reach: Ints) -> Ints:
    """Returns the pairs of queries [start, stop) under windows and causal masks."""
    return _seen_in_window(stop, reach) - _seen_in_window(start, reach)


def document_pairs(lengths: Ints, mask: str | Mask) -> int:
    """Returns the query-key pairs of whole documents."""
    reach = reach_of(mask, len(lengths))
    return int(pairs(np.zeros_like(lengths), lengths, lengths, reach).sum())


def first_key(start: Ints, reach: Ints) -> Ints:
    """Returns the first key that queries from ``start`` on need."""
    window = np.where(reach > BAND, reach - BAND + 1, reach)
    first = np.where(reach == FULL, 0, np.maximum(start - window + 1, 0))
    return np.where(reach < 0, chunk_start(start, reach), first) if np.any(reach < 0) else first


def last_key(stop: Ints, length: Ints, reach: Ints) -> Ints:
    """Returns one past the last key that queries before ``stop`` need."""
    last = np.where(reach == FULL, length, stop)
    return np.where(reach > BAND, np.minimum(stop + reach - BAND, length), last)


def keys_needed(queries: Span, length: int, reach: int) -> Span:
    """Returns the keys that one span of queries needs, in Python integers."""
    if reach == FULL:
        return 0, length
    if reach > BAND:
        return max(queries[0] - reach + BAND, 0), min(queries[1] + reach - BAND, length)
    if reach < 0:
        return queries[0] // -reach * -reach, queries[1]
    return max(queries[0] - reach + 1, 0), queries[1]


def is_causal(length: Ints, reach: Ints) -> Bools:
    """Returns whether every query sees all keys up to its own, and no others."""
    causal: Bools = (reach >= length) & (reach <= CAUSAL)
    return causal


def most_keys(length: Ints, reach: Ints) -> Ints:
    """Returns a bound of the keys that a query sees."""
    seen = np.where(reach > BAND, 2 * (reach - BAND) + 1, abs(reach))
    return np.where(reach == FULL, length, np.minimum(seen, length))


def chunk_start(position: Ints, reach: Ints) -> Ints:
    """Returns where the chunk of a position starts; 0 where the mask has no chunks."""
    size = np.maximum(-reach, 1)
    return np.where(reach < 0, position // size * size, 0)


def _seen_before(position: Ints, reach: Ints) -> Ints:
    """Returns the pairs of all queries before ``position``. Chunks have a triangle each."""
    seen = _seen_in_window(position, reach)
    if not np.any(reach < 0):
        return seen
    size = np.maximum(-reach, 1)
    chunks, rest = np.divmod(position, size)
    chunked = chunks * (size * (size + 1) // 2) + rest * (rest + 1) // 2
    return np.where(reach < 0, chunked, seen)


def _seen_in_window(position: Ints, reach: Ints) -> Ints:
    """Returns the same for a window: a triangle, then a band."""
    triangle = np.minimum(position, reach)
    seen: Ints = triangle * (triangle + 1) // 2 + (position - triangle) * reach
    return seen
