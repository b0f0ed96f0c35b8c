"""Two-way spans: parts of a causal document in which queries also see the keys behind them.

Images inside a text (Gemma 3, PaliGemma) and the prefix of a prefix-LM are such spans. A query in
the span [a, b) sees all keys that its mask shows it up to its own, and also those behind it up to
b. The keys behind a query are what this module counts; the others are those of the mask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from distca.planning.masks import CAUSAL, FULL, Mask
from distca.planning.prefixes import Prefixes
from distca.planning.spans import Bools, Ints, Overlaps, Span, Spans, as_ints, cumulative, overlaps

_STRIDE = 2 * CAUSAL  # between the positions of two documents, if all are in one order


@dataclass(frozen=True, eq=False)
class TwoWaySpans:
    """Disjoint spans [start, stop) of documents, sorted by (document, start)."""

    document: Ints
    start: Ints
    stop: Ints

    @classmethod
    def of(cls, by_document: Mapping[int, Sequence[Span]]) -> TwoWaySpans:
        rows = [(document, *span) for document, spans in by_document.items() for span in spans]
        return cls.from_rows(as_ints(rows))

    @classmethod
    def from_rows(cls, rows: Ints) -> TwoWaySpans:
        """rows: [spans, 3] document, start and stop, in any order."""
        document, start, stop = rows.reshape(-1, 3).T
        order = np.lexsort((start, document))
        return cls(document[order], start[order], stop[order])

    @classmethod
    def none(cls) -> TwoWaySpans:
        return cls.of({})

    @cached_property
    def exist(self) -> bool:
        return bool(len(self.document))

    def behind(self, other: TwoWaySpans, num_documents: int) -> TwoWaySpans:
        """Returns the spans of both, with the documents of ``other`` numbered first."""
        return TwoWaySpans(
            np.concatenate([other.document, self.document + num_documents]),
            np.concatenate([other.start, self.start]),
            np.concatenate([other.stop, self.stop]),
        )

    def last_key(self, document: Ints, stop: Ints) -> Ints:
        """Returns one past the last key that queries before ``stop`` see: ``stop``, or more."""
        found, exists = self._at(document, stop - 1)
        inside = exists & (stop <= self.stop[found])
        return np.where(inside, self.stop[found], stop)

    def pairs_before(self, document: Ints, position: Ints) -> Ints:
        """Returns how many keys behind them the queries before ``position`` see, all together."""
        found, exists = self._at(document, position - 1)
        size = self.stop - self.start
        whole = cumulative(size * (size - 1) // 2)
        queries = np.minimum(position, self.stop[found]) - self.start[found]
        # The first query of a span sees size - 1 keys behind it, each further one a key less.
        here = queries * (size[found] - 1) - queries * (queries - 1) // 2
        first = np.searchsorted(self.document, document)
        return np.where(exists, whole[found] - whole[first] + here, 0)

    def shared_with(self, queries: Spans) -> Overlaps:
        """Returns what spans of queries, grouped by document, share with two-way spans."""
        return overlaps(queries, Spans(self.document, self.start, self.stop))

    def of_documents(self, num_documents: int) -> Bools:
        """[documents] Returns whether a document has any."""
        counts: Bools = np.bincount(self.document, minlength=num_documents) > 0
        return counts

    def _at(self, document: Ints, position: Ints) -> tuple[Ints, Bools]:
        """Returns the last span that starts at or before a position, and whether there is one."""
        found = np.searchsorted(self._first, document * _STRIDE + position, side="right") - 1
        exists = (found >= 0) & (self.document[found] == document)
        return found, exists

    @cached_property
    def _first(self) -> Ints:
        return self.document * _STRIDE + self.start

    def validate(self, lengths: Ints, prefixes: Prefixes) -> None:
        """Raises ``ValueError`` for spans that cannot be. lengths: with the prefix."""
        if not self.exist:
            return
        known = (self.document >= 0) & (self.document < len(lengths))
        self._refuse(~known, f"there are only the documents 0 to {len(lengths) - 1}")
        own, length = prefixes.length[self.document], lengths[self.document]
        outside = (self.start < own) | (self.stop > length) | (self.start >= self.stop)
        self._refuse(
            outside,
            "it must start before it stops, within the document's own tokens [{}, {})",
            (own, length),
        )
        same = np.append(False, self.document[1:] == self.document[:-1])
        before = np.roll(self.stop, 1)
        self._refuse(
            same & (self.start < before),
            "it overlaps the one before, [{}, {}); give spans that are apart, or join them",
            (np.roll(self.start, 1), before),
        )
        child = np.flatnonzero(prefixes.length > 0)
        owner, cut = prefixes.parent[child], prefixes.length[child]
        while np.any(above := cut <= prefixes.length[owner]):
            owner = np.where(above, prefixes.parent[owner], owner)
        found, exists = self._at(owner, cut - 1)
        if len(wrong := np.flatnonzero(exists & (cut < self.stop[found]) & (cut > 0))):
            bad, span = wrong[0], found[wrong[0]]
            raise ValueError(
                f"document {child[bad]} has a prefix of {cut[bad]} tokens, which ends inside the"
                f" two-way span [{self.start[span]}, {self.stop[span]}) of document {owner[bad]}:"
                " its tokens see others that the prefix does not have, so end it before or behind"
            )

    def check_masks(self, reach: Ints) -> None:
        """Raises ``ValueError`` if a document with such spans has another mask than it may have."""
        kind = reach[self.document]
        wrong = np.flatnonzero((kind <= FULL) | (kind > CAUSAL))
        if len(wrong):
            document = self.document[wrong[0]]
            raise ValueError(
                f"document {document} has two-way spans and mask {Mask(int(reach[document]))}:"
                " they are for masks causal and window:N"
            )

    def _refuse(self, wrong: Bools, rule: str, values: tuple[Ints, ...] = ()) -> None:
        if not wrong.any():
            return
        bad = int(np.argmax(wrong))
        raise ValueError(
            f"document {self.document[bad]} has the two-way span"
            f" [{self.start[bad]}, {self.stop[bad]}):"
            f" {rule.format(*(value[bad] for value in values))}"
        )
