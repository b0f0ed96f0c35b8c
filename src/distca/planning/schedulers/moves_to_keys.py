"""Step 3 of the scheduler: shards move to the worker that holds their keys.

A document that spans workers makes the worker of its tail fetch all keys before the tail. If the
tail is short, it is cheaper to send its queries to the worker that holds most of these keys.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import numpy as np

from distca.planning.devices import UNLIMITED
from distca.planning.schedulers.key_holders import key_holders
from distca.planning.schedulers.ledger import Ledger
from distca.planning.schedulers.placed_shards import NO_RANK, NOT_LOOKED_AT, PlacedShards
from distca.planning.spans import Ints, Spans, as_ints
from distca.planning.traffic import num_keys_on

MOST_SHARDS = 128  # of a document whose shards move: one of more fetches little of what all fetch


class Moves(NamedTuple):
    """Moves of whole shards to other workers, [moves]."""

    saved_bytes: Ints
    shard: Ints
    rank: Ints

    def take(self, rows: Ints) -> Moves:
        return Moves(*(column[rows] for column in self))


def move_to_keys(ledger: Ledger, moves: Moves, max_adopted: float) -> None:
    """Moves shards for which this saves bytes, those that save the most first.

    A move also changes how much its two ranks have to shed later. This counts as the bytes of the
    cheapest pieces of the added or removed surplus.

    moves: see ``possible_moves``.
    max_adopted: the heaviest shard that may move to a rank without headroom for it, as a share of
        the rank's capacity. docs/planning.md has the figures for 0, 0.25 and 1.
    """
    if not len(moves.shard):
        return
    shards, loads = ledger.shards, ledger.loads
    shedding_bytes = cache(_SheddingBytes(ledger))  # asked for the same surplus again and again
    heaviest = shards.heaviest
    heaviest_load: list[int] = shards.load[heaviest].tolist()
    most_adopted: list[float] = (max_adopted * loads.capacity).tolist()
    headroom: list[int] = (loads.capacity - loads.per_rank).tolist()
    free_bytes: list[int] = ledger.free_bytes.tolist()
    homes, moving = ledger.problem.placement.worker[moves.shard], shards.load[moves.shard]
    memory = _memory_bytes(ledger, moves.shard)
    moved: dict[int, tuple[int, int, int]] = {}  # shard -> rank, home, load
    columns = (column.tolist() for column in (*moves, *memory, homes, moving))
    for saved_bytes, shard, rank, used, freed, home, load in zip(*columns, strict=True):
        before = -headroom[home]
        if saved_bytes <= 0 and before <= 0:  # most of those of documents that are dealt
            continue
        after = load - headroom[rank]
        # A rank without headroom for a shard takes it if it can shed more of its heaviest one.
        if used > free_bytes[rank] or (
            after > 0 and (after > heaviest_load[rank] or load > most_adopted[rank])
        ):
            continue
        gain = float(saved_bytes)
        if before > 0:
            gain += shedding_bytes(before) - shedding_bytes(max(before - load, 0))
        if after > 0:
            gain -= shedding_bytes(after) - shedding_bytes(max(-headroom[rank], 0))
        if gain <= 0:
            continue
        if after > 0 and (ledger.is_cut(int(heaviest[rank])) or int(heaviest[rank]) in moved):
            continue
        free_bytes[rank] -= used
        free_bytes[home] += freed
        headroom[rank] -= load
        headroom[home] += load
        moved[shard] = rank, home, load
    ledger.free_bytes[:] = free_bytes
    if moved:
        servers, left, shifted = as_ints(list(moved.values())).T
        loads.add(np.concatenate([servers, left]), np.concatenate([shifted, -shifted]))
        ledger.send_to_keys(as_ints(list(moved)), servers)


def _memory_bytes(ledger: Ledger, shard: Ints) -> tuple[Ints, Ints]:
    """[shards] Returns what shards take on another server, and keys fetched for them at home.

    Both are 0 if memory is not limited.
    """
    problem, placement, shape = ledger.problem, ledger.problem.placement, ledger.problem.shape
    if np.all(problem.devices.memory_bytes == UNLIMITED):
        return np.zeros_like(shard), np.zeros_like(shard)
    document, start, stop = placement.document[shard], placement.start[shard], placement.stop[shard]
    first, last = problem.masks.first_key(document, start), problem.masks.last_key(document, stop)
    num_own = num_keys_on(placement.worker[shard], Spans(document, first, last), placement)
    used = shape.qo_bytes * (stop - start) + shape.kv_memory_bytes * (last - first)
    return used, shape.kv_memory_bytes * (last - first - num_own)


def may_gain(ledger: Ledger) -> Ints:
    """Returns the shards whose move to their keys may save bytes, or load of a rank with a surplus.

    Documents that are dealt over hundreds of workers have none.
    """
    problem, placement, shape = ledger.problem, ledger.problem.placement, ledger.problem.shape
    fetches = (placement.start > 0) & (problem.devices.speed[placement.worker] > 0)
    # No other worker holds more keys of a document than that with the most tokens of it.
    most = np.zeros_like(placement.lengths)
    if placement.prefixes.exist:
        most = placement.lengths
    else:
        cut = np.flatnonzero(~ledger.shards.is_document)
        pair = placement.document[cut] * placement.num_workers + placement.worker[cut]
        pair, index = np.unique(pair, return_inverse=True)
        tokens = np.zeros_like(pair)
        np.add.at(tokens, index, (placement.stop - placement.start)[cut])
        np.maximum.at(most, pair // placement.num_workers, tokens)
    size = placement.stop - placement.start
    saves = shape.kv_bytes * most[placement.document] > shape.qo_bytes * size
    has_surplus = ledger.loads.above_capacity > 0
    num_shards = np.bincount(placement.document, minlength=placement.num_documents)
    has_few = num_shards[placement.document] <= MOST_SHARDS
    return np.flatnonzero(fetches & has_few & (saves | has_surplus[placement.worker]))


def possible_moves(shards: PlacedShards, shard: Ints) -> Moves:
    """Returns moves of shards that fetch keys, each to the worker that holds most of them.

    Those that save the most come first.

    shard: see ``may_gain``.
    """
    saved_bytes, rank = shards.moves_to_keys
    new = shard[rank[shard] == NOT_LOOKED_AT]
    if len(new):
        rank[new] = NO_RANK
        found = _best_moves(shards, new)
        saved_bytes[found.shard], rank[found.shard] = found.saved_bytes, found.rank
    shard = shard[rank[shard] != NO_RANK]
    moves = Moves(saved_bytes[shard], shard, rank[shard])
    return moves.take(np.lexsort((-shard, -moves.saved_bytes)))


def _best_moves(shards: PlacedShards, shard: Ints) -> Moves:
    """Returns the best move of each shard of which another worker holds keys."""
    problem, placement, shape = shards.problem, shards.problem.placement, shards.problem.shape
    document, start, stop = placement.document[shard], placement.start[shard], placement.stop[shard]
    first, last = problem.masks.first_key(document, start), problem.masks.last_key(document, stop)
    found = key_holders(placement, shard, Spans(document, first, last))
    # Home fetches the keys that it does not hold; the other worker receives queries as well.
    queries = placement.stop[found.shard] - placement.start[found.shard]
    saved = shape.kv_bytes * (found.num_keys - found.num_own) - shape.qo_bytes * queries
    return Moves(saved, found.shard, found.worker)


class _SheddingBytes:
    """Estimates the bytes of shedding some load, in pieces that fill the largest headrooms.

    A piece of P pairs moves at least sqrt(2 P ((kv + q + o)^2 - (q + o)^2)) bytes, as
    docs/planning.md derives.
    """

    def __init__(self, ledger: Ledger) -> None:
        placement, shape = ledger.problem.placement, ledger.problem.shape
        squares = placement.stop.astype(np.float64) ** 2 - placement.start.astype(np.float64) ** 2
        total_load = float(ledger.loads.per_rank.sum())
        pairs_per_load = float(squares.sum()) / 2 / max(total_load, 1.0)
        headrooms = ledger.loads.headrooms
        largest = [headroom.load for headroom in headrooms[-(len(headrooms) // 4 + 1) :]]
        self._piece_load = 1 + sum(largest) // max(len(largest), 1)  # the mean of a quarter of them
        q, kv = shape.qo_bytes, shape.kv_bytes
        self._per_root = math.sqrt(((q + kv) ** 2 - q**2) * 2.0 * pairs_per_load)

    def __call__(self, load: int) -> float:
        full, rest = divmod(load, self._piece_load)
        return self._per_root * (full * math.sqrt(self._piece_load) + math.sqrt(rest))
