"""Plan -> Layout: one rank's share of an exchange, as splits and row indices.

Legend: T rows of this rank's packed tensors; Q query rows and K key rows received from peers.
A server works on ``[own rows; received rows]``: indices below T are its own, those from T on are
received. Everything is known on the host, so an exchange needs no device synchronisation.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distca.planning.masks import Mask
from distca.planning.placement import Placement
from distca.planning.plan import Plan
from distca.planning.spans import Ints, Spans, cumulative, expand, overlaps
from distca.planning.tasks import Tasks
from distca.planning.traffic import KeyMoves, key_moves


@dataclass(frozen=True, eq=False)
class Exchange:
    """One uneven all-to-all: rows to gather and how many go to, and come from, each rank."""

    send_rows: Ints  # [sum of send_splits] rows of own tensors, ordered by receiver
    send_splits: Ints  # [ranks]
    recv_splits: Ints  # [ranks]


@dataclass(frozen=True, eq=False)
class Call:
    """One fused varlen kernel call: packed tasks of one mask kind, bottom-right aligned."""

    mask: Mask
    q_rows: Ints  # into [own q; received q]
    kv_rows: Ints  # into [own kv; received kv]
    q_offsets: Ints  # [tasks + 1]
    kv_offsets: Ints  # [tasks + 1]

    @property
    def max_queries(self) -> int:
        return int(np.diff(self.q_offsets).max(initial=0))

    @property
    def max_keys(self) -> int:
        return int(np.diff(self.kv_offsets).max(initial=0))


@dataclass(frozen=True, eq=False)
class Layout:
    """What one rank sends, receives and computes for one layer, forward or backward.

    Outputs go back the way queries came, and key gradients the way keys came: the same rows with
    the splits swapped. ``local`` calls need nothing from peers and run while data is in flight;
    ``remote`` calls need received queries, received keys, or both.
    """

    rank: int
    num_tokens: int  # T
    moves_queries: bool  # on any rank; where nothing moves, no rank joins an exchange
    moves_keys: bool
    q: Exchange
    kv: Exchange
    local: tuple[Call, ...]
    remote: tuple[Call, ...]

    @classmethod
    def of(cls, plan: Plan, rank: int, *, backward: bool = False) -> Layout:
        if not 0 <= rank < plan.devices.num_ranks:
            raise ValueError(f"rank {rank} of a plan for {plan.devices.num_ranks} ranks")
        tasks = plan.backward if backward else plan.forward
        placement, ranks = plan.placement, plan.devices.num_ranks
        moves = key_moves(tasks, placement)
        q, arriving_q = _query_exchange(tasks, placement, rank, ranks)
        kv, arriving_kv = _key_exchange(moves, placement, rank, ranks)
        num_tokens = int(placement.tokens[rank]) if rank < placement.num_workers else 0
        kv_spans = _rows_of_keys(placement, rank, moves, arriving_kv, num_tokens)
        mine = np.flatnonzero(tasks.server == rank)
        q_row = _first_query_rows(tasks, placement, rank, mine, arriving_q, num_tokens)
        order = np.argsort(q_row)  # in the order of rows, so that neighbours are copied as one
        mine, q_row = mine[order], q_row[order]
        needs = Spans(tasks.document[mine], tasks.kv_start[mine], tasks.kv_stop[mine])
        found = overlaps(needs, Spans(kv_spans.document, kv_spans.start, kv_spans.stop))
        first = kv_spans.row[found.right] + found.start - kv_spans.start[found.right]
        received = np.zeros(len(mine), dtype=bool)
        received[found.left[first >= num_tokens]] = True
        received |= tasks.home[mine] != rank
        reach = plan.reach[tasks.document[mine]]
        calls: dict[bool, list[Call]] = {False: [], True: []}
        for side in (False, True):
            for kind in np.unique(reach[received == side]).tolist():
                chosen = np.flatnonzero((received == side) & (reach == kind))
                pieces = np.isin(found.left, chosen)
                calls[side].append(
                    Call(
                        mask=Mask(kind),
                        q_rows=expand(q_row[chosen], tasks.queries[mine][chosen]),
                        kv_rows=expand(first[pieces], (found.stop - found.start)[pieces]),
                        q_offsets=cumulative(tasks.queries[mine][chosen]),
                        kv_offsets=cumulative(tasks.keys[mine][chosen]),
                    )
                )
        return cls(
            rank=rank,
            num_tokens=num_tokens,
            moves_queries=len(tasks.moved) > 0,
            moves_keys=len(moves.shard) > 0,
            q=q,
            kv=kv,
            local=tuple(calls[False]),
            remote=tuple(calls[True]),
        )


@dataclass(frozen=True, eq=False)
class _KeyRows:
    """Where on this rank keys are found, sorted by (document, start)."""

    document: Ints
    start: Ints
    stop: Ints
    row: Ints


def _query_exchange(
    tasks: Tasks, placement: Placement, rank: int, ranks: int
) -> tuple[Exchange, Ints]:
    """The exchange of queries, and the tasks that arrive in the order of their rows."""
    moved = tasks.moved
    leaving = moved[tasks.home[moved] == rank]
    leaving = leaving[np.argsort(tasks.server[leaving], kind="stable")]
    arriving = moved[tasks.server[moved] == rank]
    arriving = arriving[np.argsort(tasks.home[arriving], kind="stable")]
    rows = placement.row_of(tasks.document[leaving], tasks.q_start[leaving])
    queries = tasks.queries
    return (
        Exchange(
            send_rows=expand(rows, queries[leaving]),
            send_splits=_count(tasks.server[leaving], queries[leaving], ranks),
            recv_splits=_count(tasks.home[arriving], queries[arriving], ranks),
        ),
        arriving,
    )


def _key_exchange(
    moves: KeyMoves, placement: Placement, rank: int, ranks: int
) -> tuple[Exchange, Ints]:
    size = moves.stop - moves.start
    leaving = np.flatnonzero(moves.source == rank)
    leaving = leaving[np.argsort(moves.server[leaving], kind="stable")]
    arriving = np.flatnonzero(moves.server == rank)
    arriving = arriving[np.argsort(moves.source[arriving], kind="stable")]
    shard = moves.shard[leaving]
    rows = placement.row[shard] + moves.start[leaving] - placement.start[shard]
    return (
        Exchange(
            send_rows=expand(rows, size[leaving]),
            send_splits=_count(moves.server[leaving], size[leaving], ranks),
            recv_splits=_count(moves.source[arriving], size[arriving], ranks),
        ),
        arriving,
    )


def _rows_of_keys(
    placement: Placement, rank: int, moves: KeyMoves, arriving: Ints, num_tokens: int
) -> _KeyRows:
    """Own shards and received spans of keys, in one table."""
    own = np.flatnonzero(placement.worker == rank)
    size = (moves.stop - moves.start)[arriving]
    document = np.concatenate([placement.document[own], placement.document[moves.shard[arriving]]])
    start = np.concatenate([placement.start[own], moves.start[arriving]])
    stop = np.concatenate([placement.stop[own], moves.stop[arriving]])
    row = np.concatenate([placement.row[own], num_tokens + cumulative(size)[:-1]])
    order = np.lexsort((start, document))
    return _KeyRows(document[order], start[order], stop[order], row[order])


def _first_query_rows(
    tasks: Tasks, placement: Placement, rank: int, mine: Ints, arriving: Ints, num_tokens: int
) -> Ints:
    """The first row of each task's queries in [own q; received q]."""
    row = np.zeros(len(tasks), np.int64)
    here = mine[tasks.home[mine] == rank]
    row[here] = placement.row_of(tasks.document[here], tasks.q_start[here])
    row[arriving] = num_tokens + cumulative(tasks.queries[arriving])[:-1]
    return row[mine]


def _count(rank: Ints, size: Ints, ranks: int) -> Ints:
    total = np.zeros(ranks, np.int64)
    np.add.at(total, rank, size)
    return total
