"""Which keys the queries of each document see, for any spans of them at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from distca.planning import masks
from distca.planning.spans import Bools, Ints, Span, as_ints
from distca.planning.two_way import TwoWaySpans

CostFunction = Callable[[Ints, Ints, Ints], Ints]  # (queries, keys, pairs) -> picoseconds


@dataclass(frozen=True, eq=False)
class DocumentMasks:
    """The masks of all documents. Methods take arrays of documents and positions that broadcast."""

    lengths: Ints  # [documents] with prefixes
    reach: Ints  # [documents]
    two_way: TwoWaySpans

    def first_key(self, document: Ints, start: Ints) -> Ints:
        """Returns the first key that queries from ``start`` on need."""
        if self.all_windows:  # which takes a third of the time, as do the two below
            first: Ints = np.maximum(start - self.reach[document] + 1, 0)
            return first
        return masks.first_key(start, self.reach[document])

    def last_key(self, document: Ints, stop: Ints) -> Ints:
        """Returns one past the last key that queries before ``stop`` need."""
        if self.all_windows:
            return stop
        last = masks.last_key(stop, self.lengths[document], self.reach[document])
        if self.two_way.exist:
            last = np.maximum(last, self.two_way.last_key(document, stop))
        return last

    def last_key_up_to_own(self, document: Ints, stop: Ints) -> Ints:
        """Returns the same without keys behind queries, which full masks do not tell apart."""
        return np.where(self.reach[document] == masks.FULL, self.lengths[document], stop)

    def num_keys(self, document: Ints, start: Ints, stop: Ints) -> Ints:
        """Returns how many keys queries [start, stop) need."""
        return self.last_key(document, stop) - self.first_key(document, start)

    def pairs(self, document: Ints, start: Ints, stop: Ints) -> Ints:
        """Returns the query-key pairs of queries [start, stop)."""
        if self.all_windows:
            return masks.window_pairs(start, stop, self.reach[document])
        pairs = masks.pairs(start, stop, self.lengths[document], self.reach[document])
        if self.two_way.exist:
            before = self.two_way.pairs_before
            pairs = pairs + (before(document, stop) - before(document, start))
        return pairs

    def load(self, document: Ints, start: Ints, stop: Ints, cost_ps: CostFunction) -> Ints:
        """Returns the load of queries [start, stop); empty spans have load 0.

        Each chunk costs what a document of its own does.
        """
        if self.all_causal:  # which takes a third of the time
            queries = stop - start
            return cost_ps(queries, stop, queries * (start + stop + 1) // 2) * (queries > 0)
        keys, pairs = self.num_keys(document, start, stop), self.pairs(document, start, stop)
        load = cost_ps(stop - start, keys, pairs) * (stop > start)
        if not self._any_chunks:
            return load
        reach = self.reach[document]
        size = np.maximum(-reach, 1)
        first, last = masks.chunk_start(start, reach), masks.chunk_start(stop - 1, reach)
        between = np.maximum((last - first) // size - 1, 0)

        def causal(first: Ints, start: Ints, stop: Ints) -> Ints:
            seen = (stop - start) * (stop + start - 2 * first + 1) // 2
            return cost_ps(stop - start, stop - first, seen) * (stop > start)

        chunked = causal(first, start, np.minimum(stop, first + size))
        chunked += between * causal(first, first, first + size)
        chunked += causal(last, last, stop) * (last > first)
        return np.where(reach < 0, chunked, load)

    def keys_needed(self, document: int, queries: Span) -> Span:
        """Returns the keys that one span of queries needs, in Python integers."""
        lengths, reach = self._lists
        first, last = masks.keys_needed(queries, lengths[document], reach[document])
        if self.two_way.exist:
            last = max(last, int(self.two_way.last_key(as_ints(document), as_ints(queries[1]))))
        return first, last

    @cached_property
    def is_causal(self) -> Bools:
        """[documents] Whether every query sees all keys up to its own, and no others."""
        causal = masks.is_causal(self.lengths, self.reach)
        return causal & ~self.two_way.of_documents(len(self.lengths))

    @cached_property
    def all_causal(self) -> bool:
        return bool(self.is_causal.all())

    @cached_property
    def all_windows(self) -> bool:
        """Whether all masks are windows; a causal mask is one that is longer than any document."""
        windows = (self.reach > 0) & (self.reach <= masks.CAUSAL)
        return bool(np.all(windows)) and not self.two_way.exist

    @cached_property
    def _any_chunks(self) -> bool:
        return bool(np.any(self.reach < 0))

    @cached_property
    def _lists(self) -> tuple[list[int], list[int]]:
        return self.lengths.tolist(), self.reach.tolist()
