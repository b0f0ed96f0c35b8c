"""The keys that ranks have while a schedule is made, so that none is sent twice to a server."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from copy import copy

from distca.planning.schedulers.key_spans import KeysOnRanks, KeySpans, joined
from distca.planning.schedulers.placed_shards import PlacedShards
from distca.planning.spans import Ints, Span, gaps, meet, with_span


class HeldKeys:
    """Spans of keys that ranks have of each document: their own, fetched, or received ones.

    Keys of a prefix belong to the document that has them, so that its continuations share them.
    """

    def __init__(self, shards: PlacedShards, start: KeysOnRanks | None = None) -> None:
        self._shards, self._start = shards, start
        self._held: dict[int, KeySpans] = {}  # document -> who holds its own keys, if asked for

    def copy(self) -> HeldKeys:
        """Returns the same keys; lists of spans are replaced, never changed."""
        other = copy(self)
        other._held = {document: dict(held) for document, held in self._held.items()}
        return other

    def possible_holders(self, document: int) -> Collection[int]:
        """Returns the ranks that may have keys of a document, with those of its prefix."""
        parts = self._shards.all_parts(document)
        if len(parts) == 1:
            return self._own(document)
        return set().union(*(self._own(owner) for owner, _ in parts))

    def holds(self, document: int, rank: int) -> bool:
        """Returns whether one of these ranks has any."""
        parts = self._shards.all_parts(document)
        return len(parts) == 1 or any(
            meet(self._own(owner).get(rank, ()), part) for owner, part in parts
        )

    def held(self, document: int, rank: int) -> Sequence[Span]:
        """Returns the keys of a document that a rank has, with those of its prefix."""
        parts = self._shards.all_parts(document)
        if len(parts) == 1:
            return self._own(document).get(rank, ())
        own = ((self._own(owner).get(rank), part) for owner, part in parts)
        return joined(({rank: spans}, part) for spans, part in own if spans).get(rank, ())

    def add(self, document: int, rank: int, keys: Span) -> list[tuple[Ints, Ints]]:
        """Adds keys to a rank; returns how many new ones owners send, [(owner, number)]."""
        return [
            self._shards.homes_of(owner, gap)
            for owner, before, part in self._take(document, rank, keys)
            for gap in gaps(before, part)
        ]

    def keep_own(self, document: int, rank: int) -> None:
        """Drops the keys of a document that a worker has, but do not live there."""
        self._own(document)[rank] = list(self._shards.homes(document)[rank])

    def _own(self, document: int) -> KeySpans:
        """Returns the ranks that have keys of a document, without those of its prefix."""
        if document not in self._held:
            start = None if self._start is None else self._start.of(document)
            self._held[document] = dict(start or self._shards.held_at_home(document))
        return self._held[document]

    def _take(self, document: int, rank: int, keys: Span) -> list[tuple[int, list[Span], Span]]:
        """Adds keys to a rank; returns what it had of each document they are of, and the keys."""
        taken = []
        for owner, part in self._shards.parts(document, keys):
            held = self._own(owner)
            before = held.get(rank, [])
            held[rank] = with_span(before, part)
            taken.append((owner, before, part))
        return taken
