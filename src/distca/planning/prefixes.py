"""Shared prefixes: documents that continue the first tokens of another one.

A document may name a parent and how many of its first tokens are its own prefix, as the completions
of one prompt do. The prefix is stored once, with the document that has the tokens. Positions count
from the beginning of the prefix: a document of 30 tokens behind a prefix of 100 has the positions
100 to 129, and a query at position 110 sees keys 0 to 110, of which the first 100 are another
document's. Parents may have parents of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from distca.planning.spans import Bools, Ints, Spans

NO_PARENT = -1


@dataclass(frozen=True, eq=False)
class Prefixes:
    """The parent of each document, and how many of its first tokens are the document's prefix."""

    parent: Ints  # [documents]; NO_PARENT: none
    length: Ints  # [documents]; 0 without a parent

    @classmethod
    def none(cls, num_documents: int) -> Prefixes:
        return cls(np.full(num_documents, NO_PARENT), np.zeros(num_documents, np.int64))

    @cached_property
    def exist(self) -> bool:
        return bool(np.any(self.length > 0))

    @cached_property
    def shared(self) -> Bools:
        """[documents] Whether a document shares tokens with another one, as parent or as child."""
        shared: Bools = self.length > 0
        shared[self.parent[shared]] = True
        return shared

    @cached_property
    def _nearest_owner(self) -> Ints:
        """[documents] The nearest ancestor that has tokens of the prefix; NO_PARENT: none.

        Rows of one prompt continue each other in a chain, in which the first has the whole prompt.
        """
        owner = self.parent
        while np.any(passed := (owner != NO_PARENT) & (self.length[owner] >= self.length)):
            owner = np.where(passed, owner[owner], owner)  # each step doubles the distance
        return owner

    def behind(self, other: Prefixes) -> Prefixes:
        """Returns the prefixes of both, with the documents of ``other`` numbered first."""
        parent = np.where(self.parent == NO_PARENT, NO_PARENT, self.parent + len(other.parent))
        return Prefixes(
            np.concatenate([other.parent, parent]), np.concatenate([other.length, self.length])
        )

    def owned(self, spans: Spans) -> tuple[Ints, Spans]:
        """Divides spans of positions by the document that has the tokens.

        spans: groups are documents.

        Returns the number of the span that each part belongs to, and the parts, in the order of
        spans and of their positions.
        """
        number = np.arange(len(spans.group))
        if not self.exist or not len(number):
            return number, spans
        parts = []
        document, start, stop = spans
        while len(document):
            prefix = self.length[document]
            own, below = stop > prefix, start < prefix
            parts.append((number[own], document[own], np.maximum(start, prefix)[own], stop[own]))
            number, start, stop = number[below], start[below], np.minimum(stop, prefix)[below]
            document = self._nearest_owner[document[below]]
        number, document, start, stop = map(np.concatenate, zip(*parts, strict=True))
        order = np.lexsort((start, number))
        return number[order], Spans(document[order], start[order], stop[order])

    def validate(self, lengths: Ints) -> None:
        """Raises ``ValueError`` for parents that cannot be. lengths: with the prefix."""
        count = len(lengths)
        if len(self.parent) != count or len(self.length) != count:
            raise ValueError(
                f"{len(self.parent)} parents and {len(self.length)} prefixes for {count}"
                " documents: give one of each for every document"
            )
        if not np.any((self.parent != NO_PARENT) | (self.length != 0)):
            return
        self._refuse(
            (self.parent < NO_PARENT) | (self.parent >= count),
            f"there are only the documents 0 to {count - 1}",
        )
        self._refuse(
            (self.length < 0) | ((self.length == 0) != (self.parent == NO_PARENT)),
            "a document with a parent has a prefix of at least one token, and one without has none",
        )
        limit = np.where(self.parent == NO_PARENT, 0, lengths[self.parent])
        self._refuse(
            self.length > limit,
            "a prefix cannot be longer than the parent, which has {limit} tokens",
            limit,
        )
        self._refuse(
            self.length >= lengths, "a document needs at least one token behind its prefix"
        )
        ancestor = self.parent
        for _ in range(count.bit_length() + 1):  # each step doubles the distance
            ancestor = np.where(ancestor == NO_PARENT, NO_PARENT, ancestor[ancestor])
        self._refuse(ancestor != NO_PARENT, "parents must not form a cycle")

    def _refuse(self, wrong: Bools, rule: str, limit: Ints | None = None) -> None:
        if not wrong.any():
            return
        bad = int(np.argmax(wrong))
        raise ValueError(
            f"document {bad} has parent {self.parent[bad]} and a prefix of {self.length[bad]}"
            f" tokens: {rule.format(limit=None if limit is None else limit[bad])}"
        )
