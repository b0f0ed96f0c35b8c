"""How to take pieces out of one shard: where it may be cut, and which cut moves the least.

Pieces that fill whole rooms lie one under the other, down from a *top*; the remainder lies at its
own cheapest place further down. All tops are tried at once, as arrays, and the best is kept.
docs/planning.md derives why pieces of this shape are the cheapest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from distca.planning import masks
from distca.planning.models import ModelShape
from distca.planning.problem import Grain, Price
from distca.planning.spans import Floats, Ints, as_ints

NUM_TOPS = 32
NEWTON_STEPS = 8
ONE_BEFORE = as_ints([[1], [0]])  # taken from indices: those before them, and they themselves
INSIDE_NODE = 0.125  # what a byte costs that stays inside a node, of one that leaves it


class Piece(NamedTuple):
    """Queries [start, stop) of a shard for one server, and what they cost there."""

    start: int
    stop: int
    server: int
    load: int


class Target(NamedTuple):
    """A server that may take a piece."""

    server: int
    room: int  # picoseconds
    free_bytes: int  # memory
    received: int  # bytes that its port takes already
    near: bool  # on the node where the queries live
    held: Sequence[tuple[int, int]] = ()  # disjoint spans of the document's keys that it has


class Source(NamedTuple):
    """A worker that holds keys [start, stop) of the document, and what its port sends already."""

    rank: int
    start: int
    stop: int
    sent: int
    near: bool  # on the node where the queries live


class Carving(NamedTuple):
    pieces: list[Piece]
    over_limit: int  # bytes by which the busiest port would pass the limit
    cost: float  # bytes in all, those inside a node at a discount

    @property
    def score(self) -> tuple[int, float]:
        return self.over_limit, self.cost


@dataclass(frozen=True, eq=False)
class Divisible:
    """One shard, the places where it may be cut, and what any span of its queries costs."""

    start: int
    stop: int
    length: int  # of the whole document
    reach: int
    price: Price
    cuts: Ints  # where it may be cut, its two ends included
    head: Ints  # [cuts] what the queries before each cost

    @classmethod
    def of(
        cls, start: int, stop: int, length: int, reach: int, price: Price, grain: Grain
    ) -> Divisible:
        first, last = (
            -(-(start + grain.minimum) // grain.step),
            (stop - grain.minimum) // grain.step,
        )
        inner = np.arange(first, last + 1, dtype=np.int64) * grain.step
        cuts = np.concatenate([as_ints([start]), inner, as_ints([stop])])
        shard = cls(start, stop, length, reach, price, cuts, cuts)
        return replace(shard, head=shard.load(cuts[0], cuts))

    @property
    def load_all(self) -> int:
        return int(self.head[-1])

    @cached_property
    def lightest(self) -> int:
        """What the lightest piece costs: no room below it can take any."""
        return int(self.load(self.cuts[:-1], self.cuts[1:]).min())

    def some_fit(self, room: int) -> bool:
        """Whether there is a piece that is no heavier; mostly the first one is."""
        return room >= int(self.head[1]) or room >= self.lightest

    @property
    def causal(self) -> bool:
        return self.reach >= self.length

    def load(self, start: Ints, stop: Ints) -> Ints:
        """Picoseconds of queries [start, stop); an empty span costs nothing."""
        queries = stop - start
        if self.causal:
            keys, pairs = stop, queries * (start + stop + 1) // 2
        else:
            length, reach = as_ints(self.length), as_ints(self.reach)
            keys = masks.last_key(stop, length, reach) - masks.first_key(start, reach)
            pairs = masks.pairs(start, stop, length, reach)
        return self.price(queries, keys, pairs) * (queries > 0)

    def keys_in(self, low: int | Ints, high: int, start: Ints, stop: Ints) -> Ints:
        """How many keys of [low, high) the queries [start, stop) need."""
        some, last = stop > start, stop
        if not self.causal:
            low = np.maximum(masks.first_key(start, as_ints(self.reach)), low)
            last = masks.last_key(stop, as_ints(self.length), as_ints(self.reach))
        keys: Ints = np.maximum(np.minimum(last, high) - low, 0) * some
        return keys

    def lowest_start(self, top: Ints, room: int) -> tuple[Ints, Ints]:
        """The lowest cut from which a piece up to ``top`` fits ``room``, and what it costs.

        Cuts are indices.
        """
        stop = self.cuts[top]
        guess = np.searchsorted(self.head, self.head[top] - room)
        start, excess = first_fitting(lambda i: self.load(self.cuts[i], stop) - room, guess, top)
        return start, room + excess

    def highest_stop(self, top: Ints, keep: Ints) -> Ints:
        """The highest cut, at most ``top``, up to which the shard's head costs at most ``keep``."""
        found = np.searchsorted(self.head, np.maximum(keep, 0), side="right") - 1
        return np.minimum(found, top)

    def cheapest_stop(self, load: Ints, shape: ModelShape) -> Floats:
        """Where a piece of this load would best end, if it may lie anywhere under the diagonal.

        kv x stop + (q + o) x (stop - start) is least at start / stop = (q + o) / (kv + q + o).
        """
        ratio = 2 * shape.q_bytes / (2 * shape.q_bytes + shape.kv_bytes)
        return np.sqrt(2.0 * np.maximum(load, 0) * self._pairs_per_load / (1.0 - ratio * ratio))

    @property
    def _pairs_per_load(self) -> float:
        return (self.stop**2 - self.start**2) / 2 / max(self.load_all, 1)


def carve(
    shard: Divisible,
    keep: int,
    targets: Sequence[Target],
    sources: Sequence[Source],
    shape: ModelShape,
    port_limit: int,
) -> Carving | None:
    """Leaves at most ``keep`` of the shard at home: all targets but the last are filled up.

    sources: the workers that hold the document's keys, the shard's home first. None when no top
    does it within the targets' rooms and memory.
    """
    cuts, final = shard.cuts, len(shard.cuts) - 1
    count = NUM_TOPS if len(targets) > 1 else 2 * NUM_TOPS
    count = min(final, count)
    tops = np.arange(1, count + 1, dtype=np.int64) * final // count

    # 1. Full rooms, one under the other.
    spans: list[tuple[Ints, Ints]] = []
    loads: list[Ints] = []
    bottom = tops
    for target in targets[:-1]:
        start, load = shard.lowest_start(bottom, target.room)
        spans.append((cuts[start], cuts[bottom]))
        loads.append(load)
        bottom = start

    # 2. The remainder: as much as is needed, at its cheapest stop below them.
    rest = keep - shard.load(cuts[tops], cuts[-1])  # what may stay of [start, bottom)
    stop, between = bottom, np.zeros_like(rest)  # between it and the full rooms
    if spans and shard.causal:
        needed = shard.head[bottom] - rest
        stop = np.minimum(np.searchsorted(cuts, shard.cheapest_stop(needed, shape)), bottom)
        between = shard.load(cuts[stop], cuts[bottom])
        stays = between <= rest
        stop, between = np.where(stays, stop, bottom), between * stays
    start = shard.highest_stop(stop, rest - between)
    spans.append((cuts[start], cuts[stop]))
    loads.append(shard.load(*spans[-1]))

    # 3. What each top would move, over which ports, and whether it fits.
    fits, cost = (rest >= between) & ((bottom < tops) | (start < stop)), np.zeros(len(tops))
    busiest = np.zeros(len(tops), dtype=np.int64)
    sent = [np.full(len(tops), source.sent, dtype=np.int64) for source in sources]
    for target, (low, high), load in zip(targets, spans, loads, strict=True):
        queries = high - low
        keys = shard.keys_in(0, shard.length, low, high)
        weight = 2 * queries * shape.q_bytes + keys * shape.kv_bytes  # q, o, packed keys
        for span in target.held:
            keys = keys - shard.keys_in(*span, low, high)
        arriving = queries * shape.q_bytes + keys * shape.kv_bytes
        moved = arriving + queries * shape.q_bytes
        cost += moved * (INSIDE_NODE if target.near else 1.0)
        busiest = np.maximum(busiest, target.received + arriving)
        sent[0] += queries * shape.q_bytes
        for port, source in zip(sent, sources, strict=True):
            if source.rank != target.server:
                port += _keys_from(source, target, shard, low, high) * shape.kv_bytes
        fits &= (load <= target.room) & (weight <= target.free_bytes)
    if not fits.any():
        return None
    if len(sources) > 1:
        # Where nothing stays at home, the keys that home would have fetched stay away too.
        gone = (start == 0) & (stop == bottom) & (tops == final)
        everything = as_ints(shard.start), as_ints(shard.stop)
        for port, source in zip(sent[1:], sources[1:], strict=True):
            saved = gone * shard.keys_in(source.start, source.stop, *everything) * shape.kv_bytes
            port -= saved
            cost -= saved * (INSIDE_NODE if source.near else 1.0)

    # 4. The best: the port limit first, then the bytes.
    over = np.maximum(np.maximum.reduce([busiest, *sent]) - port_limit, 0)
    best = int(np.lexsort((cost, over, ~fits))[0])
    pieces = [
        Piece(int(low[best]), int(high[best]), target.server, int(load[best]))
        for target, (low, high), load in zip(targets, spans, loads, strict=True)
        if low[best] < high[best]
    ]
    return Carving(pieces, int(over[best]), float(cost[best]))


def _keys_from(source: Source, target: Target, shard: Divisible, low: Ints, high: Ints) -> Ints:
    """Keys that a source sends for queries [low, high): what the target holds is not sent."""
    keys = shard.keys_in(source.start, source.stop, low, high)
    for start, stop in target.held:
        start, stop = max(start, source.start), min(stop, source.stop)
        if start < stop:
            keys = keys - shard.keys_in(start, stop, low, high)
    return keys


def first_fitting(excess: Callable[[Ints], Ints], guess: Ints, last: Ints) -> tuple[Ints, Ints]:
    """The smallest index in [0, last] at which ``excess``, which falls, is 0 or less; ``last`` is.

    Also the excess there. Newton steps on the index from a guess, kept inside a bracket: two or
    three do for smooth costs.
    """
    low, high = np.zeros_like(last), last.copy()
    index = np.minimum(np.maximum(guess, low), high)
    for step in range(64 + NEWTON_STEPS):
        before, here = excess(np.maximum(index - ONE_BEFORE, 0))
        fits, first = here <= 0, (before > 0) | (index == 0)
        if ((fits & first) | (low == high)).all():
            break
        high = np.where(fits, np.where(first, index, index - 1), high)
        low = np.minimum(np.where(fits, np.where(first, index, low), index + 1), high)
        if step < NEWTON_STEPS:
            slope = np.maximum(before - here, 1)
            index = np.minimum(np.maximum(index - (-here // slope), low), high)
        else:
            index = (low + high) // 2
    return index, here
