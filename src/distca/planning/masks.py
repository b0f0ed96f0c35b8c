"""Which keys a query sees: causal, full, or a sliding window.

A mask is a *reach*: query i of a document sees min(i + 1, reach) keys, ending with its own. Causal
is a reach without end; full sees the whole document and is written as reach 0. One integer for
each document lets every formula below run over all tasks at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from distca.planning.spans import Ints, as_ints

FULL = 0
CAUSAL = 1 << 40


@dataclass(frozen=True)
class Mask:
    """One document's mask. Parses from and prints as ``causal``, ``full`` or ``window:4096``."""

    reach: int = CAUSAL

    @classmethod
    def parse(cls, text: str | Mask) -> Mask:
        if isinstance(text, Mask):
            return text
        if text == "causal":
            return cls(CAUSAL)
        if text == "full":
            return cls(FULL)
        kind, _, size = text.partition(":")
        if kind == "window" and size.isdecimal() and 0 < int(size) < CAUSAL:
            return cls(int(size))
        raise ValueError(
            f"mask {text!r} is unknown: say causal, full, or window:N with N >= 1 keys"
        )

    def __str__(self) -> str:
        return {CAUSAL: "causal", FULL: "full"}.get(self.reach, f"window:{self.reach}")


def reach_of(mask: str | Mask | Sequence[str | Mask], num_documents: int) -> Ints:
    """One reach per document, from one mask for all or one for each."""
    if isinstance(mask, str | Mask):
        return np.full(num_documents, Mask.parse(mask).reach, dtype=np.int64)
    if len(mask) != num_documents:
        raise ValueError(
            f"{len(mask)} masks for {num_documents} documents: give one for all or one for each"
        )
    return as_ints([Mask.parse(m).reach for m in mask])


def pairs(start: Ints, stop: Ints, length: Ints, reach: Ints) -> Ints:
    """Query-key pairs of queries [start, stop) of a document of ``length`` tokens."""
    seen = _seen_before(stop, reach) - _seen_before(start, reach)
    return np.where(reach == FULL, (stop - start) * length, seen)


def first_key(start: Ints, reach: Ints) -> Ints:
    """First key that queries from ``start`` on need."""
    return np.where(reach == FULL, 0, np.maximum(start - reach + 1, 0))


def last_key(stop: Ints, length: Ints, reach: Ints) -> Ints:
    """One past the last key that queries up to ``stop`` need."""
    return np.where(reach == FULL, length, stop)


def keys_needed(queries: tuple[int, int], length: int, reach: int) -> tuple[int, int]:
    """``first_key`` and ``last_key`` of one span of queries, in plain integers."""
    if reach == FULL:
        return 0, length
    return max(queries[0] - reach + 1, 0), queries[1]


def _seen_before(position: Ints, reach: Ints) -> Ints:
    """Pairs of all queries before ``position``: a triangle, then a band of width ``reach``."""
    triangle = np.minimum(position, reach)
    seen: Ints = triangle * (triangle + 1) // 2 + (position - triangle) * reach
    return seen
