"""Plan -> Layout: one rank's share of a plan in one direction.

A server reads its rows from blocks: block 0 is its own packed tensors, and block i is what the i-th
of its senders sent, in the order of ranks. Everything is known on the host, so an exchange never
synchronises with the device. Needs numpy alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from distca.dispatch.rows import Rows
from distca.planning.masks import CAUSAL, Mask
from distca.planning.placement import Placement
from distca.planning.plan import Plan
from distca.planning.prefixes import Prefixes
from distca.planning.spans import Ints, Spans, cumulative, expand, overlaps
from distca.planning.tasks import Tasks
from distca.planning.traffic import KeyMoves, key_moves


@dataclass(frozen=True, eq=False)
class PeerRows:
    """The rows of a tensor that this rank sends to servers and receives as a server.

    Results go back the same way: a server returns what it received, row by row.
    """

    send: Mapping[int, Rows]  # own rows by receiving rank, ascending; only ranks that get any
    recv: Mapping[int, int]  # number of rows by sending rank, ascending; only ranks that send any
    moves: bool  # whether any rank sends anything: where none does, no rank joins the collective


@dataclass(frozen=True, eq=False)
class Call:
    """One fused varlen kernel call: packed tasks of one mask kind, bottom-right aligned."""

    mask: Mask
    q: Rows
    kv: Rows
    q_offsets: Ints  # [tasks + 1]
    kv_offsets: Ints  # [tasks + 1]


@dataclass(frozen=True, eq=False)
class Layout:
    """What one rank sends, receives and computes in a layer, forward or backward.

    ``local`` calls need nothing from peers and run during the dispatch; ``remote`` calls need
    received queries, received keys, or both.
    """

    rank: int
    num_ranks: int
    num_tokens: int  # own rows
    q: PeerRows  # of queries
    kv: PeerRows  # of keys and values
    local: tuple[Call, ...]
    remote: tuple[Call, ...]

    @classmethod
    def of(cls, plan: Plan, rank: int, *, backward: bool = False) -> Layout:
        num_ranks, placement = plan.devices.num_ranks, plan.placement
        if not 0 <= rank < num_ranks:
            raise ValueError(f"rank {rank} of a plan for {num_ranks} ranks")
        tasks = plan.backward if backward else plan.forward
        # 1. What moves.
        q, arrived_q = _move_queries(tasks, placement, rank)
        kv, arrived_kv = _move_keys(key_moves(tasks, placement), placement, rank)
        # 2. The queries and keys that are on this rank after the dispatch.
        queries = _queries_here(tasks, placement, rank, arrived_q)
        keys = _keys_here(placement, rank, arrived_kv)
        # 3. The calls over them.
        local, remote = _calls(tasks, plan.reach, placement.prefixes, queries, keys)
        num_tokens = int(placement.tokens[rank]) if rank < placement.num_workers else 0
        return cls(rank, num_ranks, num_tokens, q, kv, local, remote)

    @property
    def is_one_call(self) -> bool:
        """Whether one call computes all rows as they lie, and none is sent or received."""
        if len(self.local) != 1 or self.remote or self.q.send or self.kv.send:
            return False
        everything = ((0, 0, self.num_tokens),)
        return self.local[0].q.runs == self.local[0].kv.runs == everything


class _Queries(NamedTuple):
    """Tasks whose queries are on this rank, and where they lie."""

    task: Ints
    block: Ints
    row: Ints  # the first one, in the block


class _Keys(NamedTuple):
    """Spans of keys on this rank, and where they lie."""

    document: Ints
    start: Ints
    stop: Ints
    block: Ints
    row: Ints


class _Sequences(NamedTuple):
    """Queries and keys that a kernel sees by themselves: a task, or a chunk of one."""

    task: Ints
    queries: Ints
    keys: Ints


def _move_queries(tasks: Tasks, placement: Placement, rank: int) -> tuple[PeerRows, _Queries]:
    moved = tasks.moved
    leaving = _by(tasks.server, moved[tasks.home[moved] == rank])
    arriving = _by(tasks.home, moved[tasks.server[moved] == rank])
    row = placement.row_of(tasks.document[leaving], tasks.q_start[leaving])
    send = _send(tasks.server[leaving], row, tasks.queries[leaving])
    recv, block, first = _recv(tasks.home[arriving], tasks.queries[arriving])
    return PeerRows(send, recv, len(moved) > 0), _Queries(arriving, block, first)


def _move_keys(moves: KeyMoves, placement: Placement, rank: int) -> tuple[PeerRows, _Keys]:
    """Returns the keys that move, and the received spans in the order of their rows."""
    leaving = _by(moves.server, np.flatnonzero(moves.source == rank))
    arriving = _by(moves.source, np.flatnonzero(moves.server == rank))
    size, shard = moves.stop - moves.start, moves.shard[leaving]
    row = placement.row[shard] + moves.start[leaving] - placement.start[shard]
    send = _send(moves.server[leaving], row, size[leaving])
    recv, block, first = _recv(moves.source[arriving], size[arriving])
    document = placement.document[moves.shard[arriving]]
    received = _Keys(document, moves.start[arriving], moves.stop[arriving], block, first)
    return PeerRows(send, recv, len(moves.shard) > 0), received


def _queries_here(tasks: Tasks, placement: Placement, rank: int, arrived: _Queries) -> _Queries:
    """Returns the tasks of this rank in the order of their rows, so that neighbours are one run."""
    here = np.flatnonzero((tasks.server == rank) & (tasks.home == rank))
    own = placement.row_of(tasks.document[here], tasks.q_start[here])
    task = np.concatenate([here, arrived.task])
    block = np.concatenate([np.zeros_like(here), arrived.block])
    row = np.concatenate([own, arrived.row])
    order = np.lexsort((row, block))
    return _Queries(task[order], block[order], row[order])


def _keys_here(placement: Placement, rank: int, received: _Keys) -> _Keys:
    """Returns own shards and received spans, sorted by (document, start)."""
    own = np.flatnonzero(placement.worker == rank)
    mine = _Keys(
        placement.document[own],
        placement.start[own],
        placement.stop[own],
        np.zeros_like(own),
        placement.row[own],
    )
    both = _Keys(*map(np.concatenate, zip(mine, received, strict=True)))
    order = np.lexsort((both.start, both.document))
    return _Keys(*(column[order] for column in both))


def _calls(
    tasks: Tasks, reach: Ints, prefixes: Prefixes, queries: _Queries, keys: _Keys
) -> tuple[tuple[Call, ...], tuple[Call, ...]]:
    """Returns the local and the remote calls: one for each kind of kernel."""
    mine = queries.task
    num_queries = tasks.queries[mine]
    task, needs = prefixes.owned(Spans(*(column[mine] for column in tasks.key_spans)))
    # A task may read several spans of keys: ``reader`` is the task, ``found.right`` the span.
    found = overlaps(needs, Spans(keys.document, keys.start, keys.stop))
    reader = task[found.left]
    block, skipped = keys.block[found.right], found.start - keys.start[found.right]
    row = keys.row[found.right] + skipped
    stop = row + found.stop - found.start
    # A task is remote if its queries, or some of its keys, are in a block that was received.
    needs_peers = queries.block > 0
    needs_peers[reader[block > 0]] = True
    kinds = np.where(reach < 0, CAUSAL, reach)[tasks.document[mine]]
    sequence = _sequences(tasks.only(mine), reach)
    calls: tuple[list[Call], list[Call]] = ([], [])
    for remote in (False, True):
        for kind in np.unique(kinds[needs_peers == remote]).tolist():
            chosen = (needs_peers == remote) & (kinds == kind)
            spans = chosen[reader]
            packed = chosen[sequence.task]
            first, last = queries.row[chosen], queries.row[chosen] + num_queries[chosen]
            calls[remote].append(
                Call(
                    mask=Mask(kind),
                    q=Rows.of(queries.block[chosen], first, last),
                    kv=Rows.of(block[spans], row[spans], stop[spans]),
                    q_offsets=cumulative(sequence.queries[packed]),
                    kv_offsets=cumulative(sequence.keys[packed]),
                )
            )
    return tuple(calls[0]), tuple(calls[1])


def _sequences(tasks: Tasks, reach: Ints) -> _Sequences:
    """Divides tasks at the ends of chunks, whose keys follow each other as their queries do."""
    of_task = reach[tasks.document]
    size = np.where(of_task < 0, -of_task, tasks.keys)
    count = -(-tasks.keys // size)
    task = np.repeat(np.arange(len(tasks)), count)
    start = tasks.kv_start[task] + expand(np.zeros_like(count), count) * size[task]
    stop = np.minimum(start + size[task], tasks.kv_stop[task])
    inside = stop - np.maximum(start, tasks.q_start[task])
    queries = np.where(count[task] == 1, tasks.queries[task], inside)
    return _Sequences(task, queries, stop - start)


def _send(receiver: Ints, row: Ints, size: Ints) -> dict[int, Rows]:
    """Returns own rows by receiver, from spans that are sorted by receiver."""
    ranks, first = np.unique(receiver, return_index=True)
    bounds = pairwise([*first.tolist(), len(receiver)])
    own, stop = np.zeros_like(row), row + size
    return {
        rank: Rows.of(own[a:b], row[a:b], stop[a:b])
        for rank, (a, b) in zip(ranks.tolist(), bounds, strict=True)
    }


def _recv(sender: Ints, size: Ints) -> tuple[dict[int, int], Ints, Ints]:
    """Returns the number of rows by sender, and the block and first row of each span.

    Spans are sorted by sender.
    """
    ranks, first, index = np.unique(sender, return_index=True, return_inverse=True)
    offsets = cumulative(size)
    num_rows = np.diff(np.append(offsets[first], offsets[-1]))
    row = offsets[:-1] - offsets[first][index]
    return dict(zip(ranks.tolist(), num_rows.tolist(), strict=True)), index + 1, row


def _by(rank: Ints, chosen: Ints) -> Ints:
    """Returns the chosen entries sorted by rank; those of one rank keep their order."""
    return chosen[np.argsort(rank[chosen], kind="stable")]
