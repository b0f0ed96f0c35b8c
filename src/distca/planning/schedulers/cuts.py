"""The cheapest ways to cut pieces out of shards for given servers, for many shards at once.

All servers but the last are filled up: their pieces lie one below the other, downwards from a
*top*. The piece of the last server is the remainder, which lies at its own cheapest place further
down. Many tops are tried for each shard, and the best one is chosen. docs/planning.md derives why
pieces of this form move the fewest bytes.

Shapes: R requests, S servers of each, T tops of each. What does not depend on the top has T = 1.
Names that end in ``_cut`` are numbers of cuts (``cuttable``); all other places are positions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from distca.planning.models import ModelShape
from distca.planning.schedulers.cuttable import CuttableShards
from distca.planning.schedulers.requests import Requests, Targets
from distca.planning.spans import Bools, Floats, Ints, Span

NUM_TOPS = 32  # 24 and 48 move 0.1 % more and less; a single piece has twice as many, in two rows


class Piece(NamedTuple):
    """Queries [start, stop) of a shard that one server computes, and their load."""

    start: int
    stop: int
    server: int
    load: int

    @property
    def span(self) -> Span:
        return self.start, self.stop


Score = tuple[int, float, int]  # bytes over the limit; bytes moved, weighted; the shard


class Cut(NamedTuple):
    """Pieces of one shard for other servers."""

    shard: int
    pieces: list[Piece]
    peak: int  # the most bytes that any of the ranks would send or receive in total


@dataclass(frozen=True, eq=False)
class Candidates:
    """Ways to cut the shards, one for each top."""

    start: Ints  # [S, R, T] the piece of each server
    stop: Ints  # [S, R, T]
    load: Ints  # [S, R, T]
    keys: Ints  # [S, R, T] number of keys that the piece needs
    sheds_enough: Bools  # [R, T] whether at most the allowed load stays at home
    keeps_nothing: Bools  # [R, T] whether nothing stays at home

    @property
    def queries(self) -> Ints:
        return self.stop - self.start


@dataclass(frozen=True, eq=False)
class Choices:
    """Candidates, and what each of them moves."""

    requests: Requests
    candidates: Candidates
    fits: Bools  # [R, T] whether it sheds enough and fits the headroom and memory of the servers
    weighted_bytes: Floats  # [R, T] bytes moved, where those inside a node count less
    peak: Ints  # [R, T] the most bytes that any of the ranks would send or receive in total
    _best: dict[int, tuple[list[int], list[int], list[float]]] = field(default_factory=dict)

    def best(self, row: int, traffic_limit: int) -> Option:
        """Returns the cheapest option of a request, one of those that exceed the limit the least.

        There must be one that fits.
        """
        if traffic_limit not in self._best:  # of all requests at once, since the limit rarely rises
            self._best[traffic_limit] = self._best_of_all(traffic_limit)
        top, over_limit, weighted_bytes = self._best[traffic_limit]
        score = over_limit[row], weighted_bytes[row], self.requests.number[row]
        return Option(score, self, row, top[row])

    def _best_of_all(self, traffic_limit: int) -> tuple[list[int], list[int], list[float]]:
        """[R] Returns the best top, and for it bytes over the limit, and bytes moved."""
        unfit = np.iinfo(np.int64).max
        over_limit = np.where(self.fits, np.maximum(self.peak - traffic_limit, 0), unfit)
        least = over_limit.min(axis=1)
        weighted_bytes = np.where(over_limit == least[:, None], self.weighted_bytes, np.inf)
        top = weighted_bytes.argmin(axis=1)
        return top.tolist(), least.tolist(), weighted_bytes.min(axis=1).tolist()

    def cut(self, row: int, top: int) -> Cut:
        """Returns the pieces of one of the candidates."""
        c, servers = self.candidates, self.requests.targets.server
        columns = (one[:, row, top].tolist() for one in (c.start, c.stop))
        pieces = zip(
            *columns, servers[:, row, 0].tolist(), c.load[:, row, top].tolist(), strict=True
        )
        return Cut(
            self.requests.number[row],
            [Piece(*piece) for piece in pieces if piece[0] < piece[1]],
            int(self.peak[row, top]),
        )


class Option(NamedTuple):
    """The best candidate of a request."""

    score: Score
    choices: Choices
    row: int
    top: int

    def cut(self) -> Cut:
        return self.choices.cut(self.row, self.top)


def evaluate_requests(requests: Requests, shape: ModelShape) -> Choices:
    """Returns what there is to choose from for each request."""
    candidates = list_candidates(requests, shape)
    fits = candidates.sheds_enough & _fits(candidates, requests.targets, shape)
    return Choices(requests, candidates, fits, *_traffic(requests, candidates, shape))


def list_candidates(requests: Requests, shape: ModelShape) -> Candidates:
    """Fills all targets but the last from each top downwards, then places the remainder."""
    shards, headrooms = requests.shards, requests.targets.headroom
    only_one = requests.half > 0
    top_cut = shards.spread_cuts(NUM_TOPS, requests.half)
    bottom_cut, bottoms = _fill_downwards(shards, top_cut, requests.targets)
    may_stay = requests.keep - shards.load(bottoms[0], shards.stop)
    rest_cut, gap = top_cut, np.zeros_like(may_stay)
    if len(headrooms) > 1:
        rest_cut, gap = _cheapest_stop(shards, may_stay, bottom_cut, bottoms[-1], shape)
        # If the remainder is the only piece, the tops are its possible places.
        rest_cut, gap = np.where(only_one, top_cut, rest_cut), gap * ~only_one
    low_cut = shards.highest_stop(rest_cut, may_stay - gap)
    start = np.stack([*bottoms[1:], shards.position(low_cut)])
    stop = np.stack([*bottoms[:-1], shards.position(rest_cut)])
    at_ends = (low_cut == 0) & (top_cut == shards.last_cut)
    return Candidates(
        start=start,
        stop=stop,
        load=shards.load(start, stop),
        keys=shards.num_keys(start, stop),
        sheds_enough=(may_stay >= gap) & ((bottom_cut < top_cut) | (low_cut < rest_cut)),
        keeps_nothing=at_ends & (rest_cut == bottom_cut),
    )


def _fill_downwards(
    shards: CuttableShards, top_cut: Ints, targets: Targets
) -> tuple[Ints, list[Ints]]:
    """Returns the lowest cut, and positions: tops, and starts of all pieces but the remainder."""
    bottom_cut, bottoms = top_cut, [shards.position(top_cut)]
    pairs_per_load = shards.pairs_per_load + np.zeros(top_cut.shape)
    used: Ints | slice
    for server, headroom in zip(targets.server[:-1], targets.headroom[:-1], strict=True):
        some, used = shards, slice(None)  # which copies nothing
        if (server < 0).any():
            used = np.flatnonzero(server[:, 0] >= 0)
            some = shards.take(used)
        room, stop = headroom[used], bottoms[-1][used]
        start_cut = some.lowest_start(bottom_cut[used], room, stop, pairs_per_load[used])
        start = some.position(start_cut)
        # The next piece is about as large, so that its search starts near its end.
        pairs_per_load[used] = some.pairs_for(room, start, stop)
        bottom_cut, bottom = bottom_cut.copy(), bottoms[-1].copy()
        bottom_cut[used], bottom[used] = start_cut, start
        bottoms.append(bottom)
    return bottom_cut, bottoms


def _cheapest_stop(
    shards: CuttableShards, may_stay: Ints, bottom_cut: Ints, bottom: Ints, shape: ModelShape
) -> tuple[Ints, Ints]:
    """Returns the cut where the remainder should stop, below pieces that start at ``bottom``.

    Also returns the gap: the load between the remainder and those pieces, which stays at home.
    There is none if it would be more than the load ``may_stay``, or if the mask is not causal.
    """
    leaving = shards.load(shards.start, bottom) - may_stay
    cheapest_cut = shards.nearest_cut(shards.cheapest_stop(leaving, shape))
    stop_cut = np.minimum(cheapest_cut, bottom_cut)
    gap = shards.load(shards.position(stop_cut), bottom)
    stays = (gap <= may_stay) & shards.is_causal
    return np.where(stays, stop_cut, bottom_cut), gap * stays


def _fits(candidates: Candidates, targets: Targets, shape: ModelShape) -> Bools:
    """[R, T] Returns whether all pieces fit into the headroom and the memory of their servers."""
    # A server holds q, o and a packed copy of the keys.
    used = shape.qo_bytes * candidates.queries + shape.kv_memory_bytes * candidates.keys
    fits: Bools = (candidates.load <= targets.headroom) & (used <= targets.free_bytes)
    return np.asarray(fits.all(axis=0))


def _traffic(requests: Requests, c: Candidates, shape: ModelShape) -> tuple[Floats, Ints]:
    """Adds up what candidates move: q and missing keys to the servers, o back home.

    Returns weighted bytes and the peak, [R, T].
    """
    shards, targets, sources = requests.shards, requests.targets, requests.sources
    # 1. What servers receive.
    keys = c.keys - _held_keys(requests, c)
    q_bytes = shape.q_bytes * c.queries
    arriving = q_bytes + shape.kv_bytes * keys
    returning = shape.o_bytes * c.queries
    weighted: Floats = np.add.reduce((arriving + returning) * targets.byte_weight)
    peak = np.maximum.reduce(targets.received + arriving)
    # 2. What the owners of the keys send, [sources, T]. Home also sends the queries.
    row, homes, others = sources.row, slice(len(peak)), slice(len(peak), None)
    keys = shards.num_keys_in(
        sources.start, sources.stop, c.start[:, row], c.stop[:, row], rows=row
    )
    keys -= _held_keys(requests, c, of_sources=True)
    keys *= targets.server[:, row] != sources.worker
    sent = sources.sent + shape.kv_bytes * np.add.reduce(keys)
    sent[homes] += np.add.reduce(q_bytes)
    peak = np.maximum(peak, sent[homes])
    if len(row) == len(peak):
        return weighted, peak
    # 3. Home fetches no keys for a shard of which it computes nothing.
    row = row[others]
    fetched = shards.num_keys_in(
        sources.start[others], sources.stop[others], shards.start[row], shards.stop[row], rows=row
    )
    saved = c.keeps_nothing[row] * fetched * shape.kv_bytes
    np.subtract.at(weighted, row, saved * sources.byte_weight[others])
    np.maximum.at(peak, row, sent[others] - saved)
    return weighted, peak


def _held_keys(requests: Requests, c: Candidates, *, of_sources: bool = False) -> Ints:
    """[S, R, T] Returns how many of the keys of each piece its server holds already.

    of_sources: [S, sources, T] returns those among the keys of each source.
    """
    held, sources = requests.held, requests.sources
    num_columns = len(sources.row) if of_sources else len(requests.keep)
    keys = np.zeros((len(c.start), num_columns, c.start.shape[2]), np.int64)
    if not len(held.row):
        return keys
    slot, row, low, high, column = held.slot, held.row, held.start, held.stop, held.row
    if of_sources:
        column, which = np.nonzero(sources.row[:, None] == held.row)
        slot, row = slot[which], row[which]
        low = np.maximum(low[which], sources.start[column])
        high = np.minimum(high[which], sources.stop[column])
    start, stop = c.start[slot, row], c.stop[slot, row]
    num_keys = requests.shards.num_keys_in(low, high, start, stop, rows=row)
    np.add.at(keys, (slot, column), num_keys)
    return keys
