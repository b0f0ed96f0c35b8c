"""One shard as the scheduler cuts it: where it may be cut, and what any span of it costs."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from distca.planning import masks
from distca.planning.costs.base import TaskCost
from distca.planning.models import ModelShape
from distca.planning.problem import Grain
from distca.planning.search import first_fitting
from distca.planning.spans import Floats, Ints, Span, as_ints


class Tops(NamedTuple):
    """Positions from which pieces are cut downwards, and the load of the queries above them."""

    indices: Ints
    load_above: Ints


@dataclass(frozen=True, eq=False)
class CuttableShard:
    """A shard with the positions at which it may be cut. Methods work on arrays of positions."""

    start: int
    stop: int
    length: int  # of the whole document
    reach: int
    cost: TaskCost
    positions: Ints  # ascending; the first is ``start`` and the last is ``stop``
    _tops: dict[int, Tops] = field(init=False, repr=False, default_factory=dict)

    @classmethod
    def of(cls, span: Span, length: int, reach: int, cost: TaskCost, grain: Grain) -> CuttableShard:
        start, stop = span
        cuts = np.arange(grain.first_cut(start), grain.last_cut(stop) + 1, dtype=np.int64)
        positions = np.concatenate([[start], cuts * grain.spacing, [stop]])
        return cls(start, stop, length, reach, cost, positions)

    @cached_property
    def causal(self) -> bool:
        return self.reach >= self.length

    @property
    def total_load(self) -> int:
        return int(self.load_before[-1])

    @cached_property
    def load_before(self) -> Ints:
        """[positions] The load of the queries from ``start`` to each position."""
        return self.load(self.positions[0], self.positions)

    def tops(self, count: int) -> Tops:
        """Returns about ``count`` positions, equally spaced."""
        if count not in self._tops:
            last = len(self.positions) - 1
            num = min(last, count)
            index = np.arange(1, num + 1, dtype=np.int64) * last // num
            load_above = self.load(self.positions[index], self.positions[-1])
            self._tops[count] = Tops(index, load_above)
        return self._tops[count]

    @cached_property
    def lightest_piece(self) -> int:
        """The load of the lightest piece between two neighbouring positions."""
        return int(self.load(self.positions[:-1], self.positions[1:]).min())

    def any_piece_fits(self, headroom: int) -> bool:
        """Returns whether some piece has at most this load."""
        # The first piece is the lightest of a causal document, and is known already.
        return headroom >= int(self.load_before[1]) or headroom >= self.lightest_piece

    def load(self, start: Ints, stop: Ints) -> Ints:
        """Returns the load of queries [start, stop); an empty span has load 0."""
        queries = stop - start
        if self.causal:
            keys, pairs = stop, queries * (start + stop + 1) // 2
        else:
            length, reach = as_ints(self.length), as_ints(self.reach)
            keys = masks.last_key(stop, length, reach) - masks.first_key(start, reach)
            pairs = masks.pairs(start, stop, length, reach)
        return self.cost.ps(queries, keys, pairs) * (queries > 0)

    def num_keys_in(self, span: Span, start: Ints, stop: Ints) -> Ints:
        """Returns how many keys inside ``span`` the queries [start, stop) need."""
        low: int | Ints = span[0]
        last = stop
        if not self.causal:
            low = np.maximum(masks.first_key(start, as_ints(self.reach)), low)
            last = masks.last_key(stop, as_ints(self.length), as_ints(self.reach))
        keys: Ints = np.maximum(np.minimum(last, span[1]) - low, 0) * (stop > start)
        return keys

    def lowest_start(self, stop: Ints, headroom: int) -> tuple[Ints, Ints]:
        """Returns where the largest piece that ends at ``stop`` and fits starts, and its load.

        Starts and stops are indices of positions.
        """
        end = self.positions[stop]
        guess = np.searchsorted(self.load_before, self.load_before[stop] - headroom)
        start, excess = first_fitting(
            lambda index: self.load(self.positions[index], end) - headroom, guess, stop
        )
        return start, headroom + excess

    def highest_stop(self, limit: Ints, headroom: Ints) -> Ints:
        """Returns up to where, at most ``limit``, the first queries of the shard fit.

        Stops and limits are indices of positions.
        """
        stop = np.searchsorted(self.load_before, np.maximum(headroom, 0), side="right") - 1
        return np.minimum(stop, limit)

    def cheapest_stop(self, load: Ints, shape: ModelShape) -> Floats:
        """Returns where a piece of this load should end to move the fewest bytes.

        kv x stop + (q + o) x (stop - start) is smallest at start / stop = (q + o) / (kv + q + o).
        """
        ratio = 2 * shape.q_bytes / (2 * shape.q_bytes + shape.kv_bytes)
        pairs_per_load = (self.stop**2 - self.start**2) / 2 / max(self.total_load, 1)
        return np.sqrt(2.0 * np.maximum(load, 0) * pairs_per_load / (1.0 - ratio * ratio))
