"""The keys that ranks have while a schedule is made, so that none is sent twice to a server."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from copy import copy

import numpy as np

from distca.planning.schedulers.placed_shards import KeySpans, PlacedShards, joined
from distca.planning.spans import Ints, Span, gaps, num_shared, with_span


class HeldKeys:
    """Spans of keys that ranks have of each document: their own, fetched, or received ones.

    Keys of a prefix belong to the document that has them, so that its continuations share them.
    """

    def __init__(self, shards: PlacedShards) -> None:
        self._shards = shards
        self._held: dict[int, KeySpans] = {}  # document -> who holds its own keys
        prefix = shards.problem.placement.prefixes.length
        for document in np.flatnonzero(prefix).tolist():
            for rank, spans in shards.homes(document).items():
                for span in spans:
                    self._take(document, rank, shards.keys_needed(document, span))

    def copy(self) -> HeldKeys:
        """Returns the same keys; lists of spans are replaced, never changed."""
        other = copy(self)
        other._held = {document: dict(held) for document, held in self._held.items()}
        return other

    def holders(self, document: int) -> Collection[int]:
        """Returns the ranks that have keys of a document, with those of its prefix."""
        if not self._shards.problem.placement.prefixes.length[document]:
            return self._own(document)
        return {
            rank
            for owner, part in self._shards.parts(document, self._shards.keys_of(document))
            for rank, spans in self._own(owner).items()
            if num_shared(spans, part)
        }

    def held(self, document: int, rank: int) -> Sequence[Span]:
        """Returns the keys of a document that a rank has, with those of its prefix."""
        if not self._shards.problem.placement.prefixes.length[document]:
            return self._own(document).get(rank, ())
        parts = self._shards.parts(document, self._shards.keys_of(document))
        own = (({rank: self._own(owner).get(rank, [])}, part) for owner, part in parts)
        return joined(own).get(rank, ())

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
            homes = self._shards.homes(document)
            held = {rank: list(spans) for rank, spans in homes.items()}
            if len(homes) > 1:  # each worker fetches the keys that its shards need
                for rank, spans in homes.items():
                    for span in spans:
                        need = self._shards.keys_needed(document, span)
                        *_, (_, part) = self._shards.parts(document, need)
                        held[rank] = with_span(held[rank], part)
            self._held[document] = held
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
