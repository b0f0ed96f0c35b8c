"""Steps 2 and 3 of the scheduler: shards that leave their home as a whole.

2. A worker that does not serve gives away all its shards.
3. A document that spans workers makes the worker of its tail fetch all keys before the tail. If the
   tail is short, it is cheaper to send its queries to the worker that holds most of these keys.
"""

import math
from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from distca.planning.problem import DoesNotFitError
from distca.planning.schedulers.ledger import Ledger
from distca.planning.schedulers.placed_shards import PlacedShards
from distca.planning.schedulers.shedding import find_cut
from distca.planning.schedulers.short_documents import deal_documents
from distca.planning.spans import Ints, Spans, as_ints, overlaps


def empty_idle_workers(ledger: Ledger, max_peak: int) -> None:
    """Moves every shard of a worker of speed 0, the heaviest first.

    A shard moves whole if a server has the headroom, else in pieces, else above the bound. Ends
    before all have moved if a server receives more than ``max_peak``.
    """
    shards, problem = ledger.shards, ledger.problem
    idle = np.flatnonzero(problem.devices.speed[problem.placement.worker] == 0)
    if not len(idle):
        return
    deal_documents(ledger, idle)
    idle, serving = ledger.unmoved(idle), problem.devices.serving
    for shard in idle[np.argsort(-shards.load[idle], kind="stable")].tolist():
        if ledger.received[serving].max() > max_peak:
            return
        if _move_whole(ledger, shard):
            continue
        cut = find_cut(ledger, shard)
        if cut is not None:
            ledger.move([(shard, cut.pieces)])
        elif not _move_whole(ledger, shard, above_bound=True):
            raise DoesNotFitError(
                f"tokens {shards.span(shard)} of document {shards.document[shard]} live on rank"
                f" {shards.home[shard]}, which does not serve, and no server has the memory for"
                " them: give the servers more memory, or more servers"
            )


def _move_whole(ledger: Ledger, shard: int, *, above_bound: bool = False) -> bool:
    """Moves a whole shard to the server with most headroom that has the memory for it.

    above_bound: whether to consider all servers, with or without headroom; otherwise only the one
        with most headroom, and those that have keys of the document.
    """
    shards, loads = ledger.shards, ledger.loads
    load, document = int(shards.load[shard]), shards.document[shard]
    memory_bytes = shards.memory_bytes(document, shards.span(shard))
    for server in _servers(ledger, document, above_bound=above_bound):
        has_headroom = above_bound or load <= loads.headroom(server)
        if has_headroom and memory_bytes <= ledger.free_bytes[server]:
            ledger.move_whole(shard, server)
            return True
    return False


def _servers(ledger: Ledger, document: int, *, above_bound: bool) -> Iterator[int]:
    """Yields the servers that ``_move_whole`` considers, those with most headroom first."""
    loads = ledger.loads
    if above_bound:
        servers = ledger.problem.devices.serving.tolist()
    else:
        yield from (headroom.server for headroom in loads.headrooms[-1:])
        servers = [rank for rank in ledger.keys.holders(document) if loads.serves(rank)]
    yield from sorted(servers, key=lambda server: (-loads.headroom(server), server))


class Move(NamedTuple):
    """A whole shard to another owner of its document. Sorts by the bytes that it saves."""

    saved_bytes: int
    shard: int
    rank: int


def move_to_keys(ledger: Ledger, moves: Sequence[Move], max_adopted: float) -> None:
    """Moves shards for which this saves bytes, those that save the most first.

    A move also changes how much its two ranks have to shed later. This counts as the bytes of the
    cheapest pieces of the added or removed surplus.

    moves: see ``possible_moves``.
    max_adopted: the heaviest shard that may move to a rank without headroom for it, as a share of
    the rank's capacity. docs/planning.md has the figures for 0, 0.25 and 1.
    """
    shards, loads = ledger.shards, ledger.loads
    shedding_bytes = cache(_SheddingBytes(ledger))  # asked for the same surplus again and again
    for move in moves:
        shard, rank = move.shard, move.rank
        home, load = shards.home[shard], int(shards.load[shard])
        gain = float(move.saved_bytes)
        if before := loads.surplus(home):
            gain += shedding_bytes(before) - shedding_bytes(max(before - load, 0))
        if gain > 0 and (after := load - loads.headroom(rank)) > 0:
            gain -= shedding_bytes(after) - shedding_bytes(loads.surplus(rank))
        if gain <= 0 or not _can_adopt(ledger, rank, load, max_adopted):
            continue
        memory_bytes = shards.memory_bytes(shards.document[shard], shards.span(shard))
        if memory_bytes <= ledger.free_bytes[rank]:
            ledger.move_whole(shard, rank)


def may_gain(ledger: Ledger) -> Ints:
    """Returns the shards whose move to their keys may save bytes, or load of a rank with a surplus.

    Documents that are dealt over all workers have thousands of shards for which neither is true.
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
    return np.flatnonzero(fetches & (saves | has_surplus[placement.worker]))


def possible_moves(shards: PlacedShards, shard: Ints) -> list[Move]:
    """Returns moves of shards that fetch keys, each to the worker that holds most of them.

    Those that save the most come first.

    shard: see ``may_gain``.
    """
    known = shards.moves_to_keys  # which loads do not change: the other direction has the same
    new = [number for number in shard.tolist() if number not in known]
    if new:
        known.update(dict.fromkeys(new) | _saved_by_moves(shards, as_ints(new)))
    moves = ((number, known[number]) for number in shard.tolist())
    return sorted((Move(move[0], number, move[1]) for number, move in moves if move), reverse=True)


def _saved_by_moves(shards: PlacedShards, shard: Ints) -> dict[int, tuple[int, int]]:
    """Returns for each shard the bytes that a move saves, and the worker it goes to."""
    problem, placement, shape = shards.problem, shards.problem.placement, shards.problem.shape
    document, start, stop = placement.document[shard], placement.start[shard], placement.stop[shard]
    first, last = problem.masks.first_key(document, start), problem.masks.last_key(document, stop)
    # 1. How many of the keys of each shard each worker holds.
    number, keys = placement.prefixes.owned(Spans(document, first, last))
    found = overlaps(keys, placement.spans)
    worker = placement.worker[placement.by_document[found.right]]
    pair = number[found.left] * placement.num_workers + worker
    order = np.argsort(pair, kind="stable")  # hardly any work, because numbers are sorted
    first_of_pair = np.flatnonzero(np.diff(pair[order], prepend=-1))
    held = np.add.reduceat((found.stop - found.start)[order], first_of_pair)
    number, worker = np.divmod(pair[order[first_of_pair]], placement.num_workers)
    # 2. The other worker that holds the most; of equal ones the first.
    is_home = worker == placement.worker[shard[number]]
    num_own = np.zeros_like(shard)
    num_own[number[is_home]] = held[is_home]
    number, worker, held = number[~is_home], worker[~is_home], held[~is_home]
    most = np.zeros_like(shard)
    np.maximum.at(most, number, held)
    is_most = np.flatnonzero(held == most[number])
    number, best = np.unique(number[is_most], return_index=True)
    worker, held = worker[is_most[best]], held[is_most[best]]
    # 3. Home fetches the keys that it does not hold; the other worker receives queries as well.
    saved_keys = held - num_own[number]
    saved = shape.kv_bytes * saved_keys - shape.qo_bytes * (stop - start)[number]
    moves = zip(saved.tolist(), worker.tolist(), strict=True)
    return dict(zip(shard[number].tolist(), moves, strict=True))


def _can_adopt(ledger: Ledger, rank: int, load: int, max_adopted: float) -> bool:
    """Returns whether a rank has headroom for a load, or can shed more of its heaviest shard."""
    shards, capacity = ledger.shards, ledger.loads.capacity[rank]
    if load <= ledger.loads.headroom(rank):
        return True
    heaviest = int(shards.heaviest_first(rank)[0])
    others = int(ledger.loads.per_rank[rank]) - int(shards.load[heaviest]) + load
    return not ledger.is_cut(heaviest) and load <= max_adopted * capacity and others <= capacity


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
