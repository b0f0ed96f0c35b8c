"""The keys that ranks have while a schedule is made, so that none is sent twice to a server."""

from __future__ import annotations

from copy import copy

import numpy as np

from distca.planning.schedulers.placed_shards import KeySpans, PlacedShards, joined
from distca.planning.spans import Span, num_shared, with_span


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

    def holders(self, document: int) -> KeySpans:
        """Returns the ranks that have keys of a document, with those of its prefix."""
        if not self._shards.problem.placement.prefixes.length[document]:
            return self._own(document)
        parts = self._shards.parts(document, self._shards.keys_of(document))
        return joined((self._own(owner), part) for owner, part in parts)

    def num_missing(self, document: int, rank: int, need: Span) -> int:
        """Returns how many of the keys ``need`` a rank does not have."""
        return need[1] - need[0] - num_shared(self.holders(document).get(rank, ()), need)

    def add(self, document: int, rank: int, keys: Span) -> list[tuple[int, int]]:
        """Adds keys to a rank; returns how many new ones each owner sends, (owner, number)."""
        return [
            (owner, sum(num_shared(after, span) - num_shared(before, span) for span in spans))
            for part, before, after in self._take(document, rank, keys)
            for owner, spans in self._shards.homes(part).items()
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
                        (_, part), *_ = self._shards.parts(document, need)
                        held[rank] = with_span(held[rank], part)
            self._held[document] = held
        return self._held[document]

    def _take(
        self, document: int, rank: int, keys: Span
    ) -> list[tuple[int, list[Span], list[Span]]]:
        """Adds keys to a rank; returns what it had and has then of each document they are of."""
        taken = []
        for owner, part in self._shards.parts(document, keys):
            held = self._own(owner)
            before = held.get(rank, [])
            held[rank] = with_span(before, part)
            taken.append((owner, before, held[rank]))
        return taken
