"""The cheapest way to cut pieces out of one shard for given servers.

All servers but the last are filled up: their pieces lie one below the other, downwards from a
*top*. The piece of the last server is the remainder, which lies at its own cheapest place further
down. Many tops are tried at once, as arrays, and the best one is chosen. docs/planning.md derives
why pieces of this form move the fewest bytes.

Shapes: S servers (targets), T tops.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from distca.planning.models import ModelShape
from distca.planning.schedulers.cuttable import CuttableShard
from distca.planning.spans import Bools, Floats, Ints, Span, as_ints

NUM_TOPS = 32  # 24 and 48 move 0.1 % more and less; a single piece has twice as many
INSIDE_NODE = 0.125  # weight of a byte inside a node: NVLink is about 8 times as fast as a NIC


class Piece(NamedTuple):
    """Queries [start, stop) of a shard that one server computes, and their load."""

    start: int
    stop: int
    server: int
    load: int

    @property
    def span(self) -> Span:
        return self.start, self.stop


class Target(NamedTuple):
    """A server that may take a piece."""

    server: int
    headroom: int
    free_bytes: int  # memory
    received: int  # bytes so far
    same_node: bool  # whether it shares the node of the queries
    held: Sequence[Span] = ()  # disjoint spans of the document's keys that it has already


class KeySource(NamedTuple):
    """A worker that holds some keys of the document."""

    worker: int
    span: Span
    sent: int  # bytes so far
    same_node: bool  # whether it shares the node of the queries


class Cut(NamedTuple):
    """Pieces of one shard for other servers."""

    pieces: list[Piece]
    over_limit: int  # bytes by which a rank would exceed the limit of sent or received bytes
    weighted_bytes: float  # bytes moved, where those inside a node count ``INSIDE_NODE``

    @property
    def score(self) -> tuple[int, float]:
        return self.over_limit, self.weighted_bytes


@dataclass(frozen=True, eq=False)
class Candidates:
    """Ways to cut one shard, one for each top."""

    start: Ints  # [S, T] the piece of each server
    stop: Ints  # [S, T]
    load: Ints  # [S, T]
    keys: Ints  # [S, T] number of keys that the piece needs
    sheds_enough: Bools  # [T] whether at most the allowed load stays at home
    keeps_nothing: Bools  # [T] whether nothing stays at home

    @property
    def queries(self) -> Ints:
        return self.stop - self.start


@dataclass(frozen=True, eq=False)
class CandidateTraffic:
    """What each candidate moves."""

    weighted_bytes: Floats  # [T]
    peak: Ints  # [T] most bytes that any of the ranks would send or receive in total


def best_cut(
    shard: CuttableShard,
    keep: int,
    targets: Sequence[Target],
    sources: Sequence[KeySource],
    shape: ModelShape,
    traffic_limit: int,
) -> Cut | None:
    """Returns the cheapest cut that leaves at most the load ``keep`` at home.

    sources: workers that hold keys of the document, the home of the shard first.
    traffic_limit: bytes that no rank should send or receive in total, if it can be avoided.
    Returns None if no candidate fits into the headroom and the memory of the targets.
    """
    candidates = list_candidates(shard, keep, targets, shape)
    fits = candidates.sheds_enough & _fits(candidates, targets, shape)
    if not fits.any():
        return None
    traffic = _traffic(shard, candidates, targets, sources, shape)
    over_limit = np.maximum(traffic.peak - traffic_limit, 0)
    best = int(np.lexsort((traffic.weighted_bytes, over_limit, ~fits))[0])
    columns = (candidates.start, candidates.stop, candidates.load)
    starts, stops, loads = (column[:, best].tolist() for column in columns)
    pieces = [
        Piece(start, stop, target.server, load)
        for start, stop, target, load in zip(starts, stops, targets, loads, strict=True)
        if start < stop
    ]
    return Cut(pieces, int(over_limit[best]), float(traffic.weighted_bytes[best]))


def list_candidates(
    shard: CuttableShard, keep: int, targets: Sequence[Target], shape: ModelShape
) -> Candidates:
    """Fills all targets but the last from each top downwards, then places the remainder."""
    tops = shard.tops(NUM_TOPS if len(targets) > 1 else 2 * NUM_TOPS)
    top, last = tops.indices, len(shard.positions) - 1
    starts, stops, loads = [], [], []
    bottom = top
    for target in targets[:-1]:
        stops.append(bottom)
        bottom, load = shard.lowest_start(bottom, target.headroom)
        starts.append(bottom)
        loads.append(load)
    may_stay = keep - tops.load_above
    if len(targets) == 1:  # the remainder is the only piece, and the tops are its possible places
        rest_stop, gap = top, np.zeros_like(may_stay)
    else:
        rest_stop, gap = _cheapest_stop(shard, may_stay, bottom, shape)
    rest_start = shard.highest_stop(rest_stop, may_stay - gap)
    start = shard.positions[as_ints([*starts, rest_start])]
    stop = shard.positions[as_ints([*stops, rest_stop])]
    return Candidates(
        start=start,
        stop=stop,
        load=as_ints([*loads, shard.load(start[-1], stop[-1])]),
        keys=shard.num_keys_in((0, shard.length), start, stop),
        sheds_enough=(may_stay >= gap) & ((bottom < top) | (rest_start < rest_stop)),
        keeps_nothing=(rest_start == 0) & (rest_stop == bottom) & (top == last),
    )


def _cheapest_stop(
    shard: CuttableShard, may_stay: Ints, bottom: Ints, shape: ModelShape
) -> tuple[Ints, Ints]:
    """Returns where the remainder should stop, below other pieces that start at ``bottom``.

    Also returns the gap: the load between the remainder and ``bottom``, which stays at home. There
    is none if it would be more than the load ``may_stay``, or if the mask is not causal.

    may_stay, bottom: [T] positions are given by index.
    """
    if not shard.causal:
        return bottom, np.zeros_like(may_stay)
    leaving = shard.load_before[bottom] - may_stay
    cheapest = np.searchsorted(shard.positions, shard.cheapest_stop(leaving, shape))
    stop = np.minimum(cheapest, bottom)
    gap = shard.load(shard.positions[stop], shard.positions[bottom])
    stays = gap <= may_stay
    return np.where(stays, stop, bottom), gap * stays


def _fits(candidates: Candidates, targets: Sequence[Target], shape: ModelShape) -> Bools:
    """[T] Returns whether all pieces fit into the headroom and the memory of their servers."""
    headroom = as_ints([target.headroom for target in targets])[:, None]
    free_bytes = as_ints([target.free_bytes for target in targets])[:, None]
    # A server holds q, o and a packed copy of the keys.
    used = 2 * shape.q_bytes * candidates.queries + shape.kv_bytes * candidates.keys
    fits: Bools = np.logical_and.reduce((candidates.load <= headroom) & (used <= free_bytes))
    return fits


def _traffic(
    shard: CuttableShard,
    candidates: Candidates,
    targets: Sequence[Target],
    sources: Sequence[KeySource],
    shape: ModelShape,
) -> CandidateTraffic:
    """Adds up what candidates move: q and missing keys to the servers, o back home."""
    q_bytes = shape.q_bytes * candidates.queries
    keys = _subtract_held(shard, candidates, targets, (0, shard.length), candidates.keys)
    arriving = q_bytes + shape.kv_bytes * keys
    weight = np.array([_byte_weight(target.same_node) for target in targets])[:, None]
    weighted: Floats = np.add.reduce((arriving + q_bytes) * weight)
    received = as_ints([target.received for target in targets])[:, None]
    peak = np.maximum.reduce(received + arriving)
    saves_fetching = len(sources) > 1 and bool(candidates.keeps_nothing.any())
    for source in sources:
        keys = shard.num_keys_in(source.span, candidates.start, candidates.stop)
        keys = _subtract_held(shard, candidates, targets, source.span, keys)
        for index, target in enumerate(targets):
            if target.server == source.worker:
                keys[index] = 0
        sent = source.sent + shape.kv_bytes * np.add.reduce(keys)
        if source is sources[0]:  # home also sends the queries
            sent += np.add.reduce(q_bytes)
        elif saves_fetching:  # home fetches no keys for a shard of which it computes nothing
            span = as_ints(shard.start), as_ints(shard.stop)
            fetched = shape.kv_bytes * shard.num_keys_in(source.span, *span)
            sent -= candidates.keeps_nothing * fetched
            weighted -= candidates.keeps_nothing * fetched * _byte_weight(source.same_node)
        peak = np.maximum(peak, sent)
    return CandidateTraffic(weighted, peak)


def _byte_weight(same_node: bool) -> float:
    return INSIDE_NODE if same_node else 1.0


def _subtract_held(
    shard: CuttableShard,
    candidates: Candidates,
    targets: Sequence[Target],
    span: Span,
    keys: Ints,
) -> Ints:
    """[S, T] Returns ``keys`` needed inside ``span`` without those that the targets hold."""
    if not any(target.held for target in targets):
        return keys
    keys = keys.copy()
    for index, target in enumerate(targets):
        for held in target.held:
            low, high = max(held[0], span[0]), min(held[1], span[1])
            if low < high:
                piece = candidates.start[index], candidates.stop[index]
                keys[index] -= shard.num_keys_in((low, high), *piece)
    return keys
