"""Shards as the scheduler cuts them: where they may be cut, and what any span of them costs.

A shard may be cut at few positions only. The scheduler searches among the *cuts* of a shard, which
are numbered: cut 0 is the start of the shard, the last cut is its end, and those between lie at
multiples of the grain.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from distca.planning.costs.base import TaskCost
from distca.planning.document_masks import DocumentMasks
from distca.planning.masks import CAUSAL
from distca.planning.models import ModelShape
from distca.planning.problem import Grain
from distca.planning.search import first_fitting, root, square
from distca.planning.spans import Bools, Floats, Ints

# Arrays with a row for each shard, as given and as computed from these once.
GIVEN = ("start", "stop", "document", "total_load")
COMPUTED = ("offset", "last_cut", "pairs_per_load", "is_causal", "_linear_from", "_linear_from_cut")


@dataclass(frozen=True, eq=False)
class CuttableShards:
    """Shards that are cut at the same time. Methods take arrays [..., shards, T]."""

    start: Ints  # [shards, 1], as all the others
    stop: Ints
    document: Ints
    total_load: Ints
    masks: DocumentMasks
    cost: TaskCost
    grain: Grain
    exact: float = 1.0  # see ``first_fitting``

    def take(self, rows: Ints) -> CuttableShards:
        """Returns some of the shards, with all that is computed of them."""
        some = copy(self)
        arrays = {name: getattr(self, name) for name in GIVEN + COMPUTED}
        vars(some).update({name: a[rows] for name, a in arrays.items() if a is not None})
        return some

    @staticmethod
    def join(parts: Sequence[CuttableShards]) -> CuttableShards:
        """Returns shards with the same costs as one object."""
        start, stop, document, total_load = (
            np.concatenate([getattr(part, name) for part in parts]) for name in GIVEN
        )
        return replace(parts[0], start=start, stop=stop, document=document, total_load=total_load)

    @cached_property
    def all_causal(self) -> bool:
        return self.masks.all_causal or bool(np.all(self.is_causal))

    @cached_property
    def offset(self) -> Ints:
        """What to add to the number of a cut inside a shard to get its multiple of the grain."""
        return self.grain.first_cut(self.start) - 1

    @cached_property
    def last_cut(self) -> Ints:
        """The number of the cut at the end of each shard."""
        last: Ints = np.maximum(self.grain.last_cut(self.stop) - self.offset, 0) + 1
        return last

    def position(self, cut: Ints) -> Ints:
        """Returns the position of a cut."""
        position = (cut + self.offset) * self.grain.spacing
        np.copyto(position, self.stop, where=cut >= self.last_cut)
        np.copyto(position, self.start, where=cut <= 0)
        return position

    def _position_before_last(self, cut: Ints) -> Ints:
        """Returns the same for cuts before the last one, in less time."""
        return np.where(cut <= 0, self.start, (cut + self.offset) * self.grain.spacing)

    def nearest_cut(self, position: Floats) -> Ints:
        """Returns the first cut at or behind a position."""
        inside = np.minimum(np.maximum(self._nearest_inside(position), 1), self.last_cut)
        return np.where(position <= self.start, 0, inside)

    def _nearest_inside(self, position: Floats) -> Ints:
        """Returns the same for positions inside the shards, in less time; others are outside."""
        return np.ceil(position / self.grain.spacing).astype(np.int64) - self.offset

    def spread_cuts(self, count: int, half: Ints) -> Ints:
        """[shards, T] Returns up to ``count`` cuts of each shard, equally spaced; not the first.

        half: [shards, 1] 1 or 2: the lower or the upper half of twice as many; 0: there are no
            halves.
        """
        num = np.minimum(np.where(half > 0, 2 * count, count), self.last_cut)
        steps = np.arange(1, min(count, int(num.max())) + 1, dtype=np.int64)
        cuts: Ints = np.minimum(steps + count * (half > 1), num) * self.last_cut // num
        return cuts

    def load(self, start: Ints, stop: Ints) -> Ints:
        """Returns the load of queries [start, stop); an empty span has load 0."""
        if not self.all_causal:
            return self.masks.load(self.document, start, stop, self.cost.ps)
        queries = stop - start
        load = self.cost.ps(queries, stop, queries * (start + stop + 1) // 2)
        load[queries <= 0] = 0
        return load

    def num_keys(self, start: Ints, stop: Ints) -> Ints:
        """Returns how many keys the queries [start, stop) need."""
        keys = stop if self.all_causal else self.masks.num_keys(self.document, start, stop)
        return keys * (stop > start)

    def num_keys_in(self, low: Ints, high: Ints, start: Ints, stop: Ints, rows: Ints) -> Ints:
        """Returns how many of the keys [low, high) the queries [start, stop) of some shards need.

        rows: which shards.
        """
        last = stop
        if not self.all_causal:
            low = np.maximum(self.masks.first_key(self.document[rows], start), low)
            last = self.masks.last_key(self.document[rows], stop)
        keys: Ints = np.maximum(np.minimum(last, high) - low, 0) * (stop > start)
        return keys

    def lowest_start(
        self,
        stop_cut: Ints,
        headroom: Ints,
        stop: Ints | None = None,
        pairs_per_load: Floats | None = None,
    ) -> Ints:
        """Returns the cut where the largest piece that ends at a cut and fits starts.

        stop: the position of that cut, if it is known.
        pairs_per_load: an estimate for such a piece; by default that of the whole shard.
        """
        stop = self.position(stop_cut) if stop is None else stop
        known = self.pairs_per_load if pairs_per_load is None else pairs_per_load
        pairs = np.maximum(headroom, 0) * known
        guess = root(
            np.maximum(square(stop, self._linear_from) - 2.0 * pairs, 0.0), self._linear_from
        )
        return first_fitting(
            lambda cut: self.load(self._position_before_last(cut), stop) - headroom,
            self._nearest_inside(guess),
            stop_cut,
            self._load_of_square(known),
            -self.offset,
            self.exact,
            self._linear_from_cut,
        )

    def highest_stop(self, limit_cut: Ints, headroom: Ints) -> Ints:
        """Returns the last cut, at most ``limit_cut``, up to which the first queries fit."""
        headroom = np.maximum(headroom, 0)
        pairs = headroom * self.pairs_per_load
        guess = root(square(self.start, self._linear_from) + 2.0 * pairs, self._linear_from)
        below = first_fitting(
            lambda below: self.load(self.start, self.position(limit_cut - below)) - headroom,
            limit_cut - self._nearest_inside(guess),
            limit_cut,
            self._load_of_square(self.pairs_per_load),
            limit_cut + self.offset,
            self.exact,
            self._linear_from_cut,
        )
        return limit_cut - below

    def _load_of_square(self, pairs_per_load: Floats) -> Floats:
        """Returns about how much load the queries between position 0 and the first cut have."""
        return self.grain.spacing**2 / 2 / np.maximum(pairs_per_load, 1e-9)

    def cheapest_stop(self, load: Ints, shape: ModelShape) -> Floats:
        """Returns where a piece of this load should end to move the fewest bytes.

        kv x stop + (q + o) x (stop - start) is smallest at start / stop = (q + o) / (kv + q + o).
        """
        ratio = shape.qo_bytes / (shape.qo_bytes + shape.kv_bytes)
        causal_pairs = (square(self.stop, None) - square(self.start, None)) / 2
        pairs = np.maximum(load, 0) * (causal_pairs / np.maximum(self.total_load, 1))
        return np.sqrt(2.0 * pairs / (1.0 - ratio * ratio))

    @cached_property
    def is_causal(self) -> Bools:
        return self.masks.is_causal[self.document]

    @cached_property
    def _linear_from(self) -> Floats | None:
        """The position from which the load grows linearly; None if all shards are causal.

        That of a window is its size. Under other masks the load is linear from the start, about.
        """
        if self.all_causal:
            return None
        reach = self.masks.reach[self.document]
        is_window = (reach > 0) & (reach <= CAUSAL)
        return np.where(self.is_causal, CAUSAL, np.where(is_window, reach, 1)).astype(np.float64)

    @cached_property
    def _linear_from_cut(self) -> Floats | None:
        return None if self._linear_from is None else self._linear_from / self.grain.spacing

    @cached_property
    def pairs_per_load(self) -> Floats:
        """Pairs, on average, for each picosecond."""
        return self._pairs(self.start, self.stop) / np.maximum(self.total_load, 1)

    def pairs_for(self, load: Ints, start: Ints, stop: Ints) -> Floats:
        """Returns the same for pieces [start, stop) of a load."""
        return self._pairs(start, stop) / np.maximum(load, 1)

    def _pairs(self, start: Ints, stop: Ints) -> Floats:
        """Returns about how many pairs queries [start, stop) have, up to a factor."""
        squares = square(stop, self._linear_from) - square(start, self._linear_from)
        return squares / 2
