"""Plan -> Layout: one rank's share of a plan in one direction.

A server reads its rows from blocks: block 0 is its own packed tensors, and block i is what the i-th
of its senders sent, in the order of ranks. Everything is known on the host, so an exchange never
synchronises with the device. Needs numpy alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from distca.dispatch.kernel_sequences import (
    KeysBehind,
    mirrored,
    queries_with_keys_behind,
    sequences_of,
)
from distca.dispatch.rows import Rows, Run
from distca.planning.masks import BAND, CAUSAL, Mask
from distca.planning.placement import Placement
from distca.planning.plan import Plan
from distca.planning.prefixes import Prefixes
from distca.planning.spans import Bools, Ints, Spans, as_ints, cumulative, overlaps, union
from distca.planning.tasks import Tasks
from distca.planning.traffic import KeyMoves, expansion_moves, key_moves


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
    """One fused varlen kernel call: packed tasks of one mask kind, bottom-right aligned.

    [Note: keys behind] If queries see keys behind them, a second kernel call attends to these, and
    the two results are merged. Its keys are the last ones of ``kv``, in the order of positions.
    """

    mask: Mask
    q: Rows
    kv: Rows
    q_offsets: Ints  # [sequences + 1]
    kv_offsets: Ints  # [sequences + 1]
    behind: KeysBehind | None = None


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
    matrix: PeerRows  # of the matrix that expands latents, as one row, where latents travel
    local: tuple[Call, ...]
    remote: tuple[Call, ...]

    @classmethod
    def of(cls, plan: Plan, rank: int, *, backward: bool = False) -> Layout:
        num_ranks, placement = plan.devices.num_ranks, plan.placement
        if not 0 <= rank < num_ranks:
            raise ValueError(f"rank {rank} of a plan for {num_ranks} ranks")
        tasks = plan.backward if backward else plan.forward
        # 1. What moves: nothing, if there is only one rank.
        q = kv = matrix = PeerRows({}, {}, moves=False)
        arrived_q, arrived_kv = _Queries(*as_ints([[]] * 3)), _Keys(*as_ints([[]] * 5))
        if num_ranks > 1:
            q, arrived_q = _move_queries(tasks, placement, rank)
            kv, arrived_kv = _move_keys(key_moves(tasks, placement), placement, rank)
            matrix = _move_matrix(tasks, placement, rank)
        # 2. The queries and keys that are on this rank after the dispatch.
        queries = _queries_here(tasks, placement, rank, arrived_q)
        keys = _keys_here(placement, rank, arrived_kv)
        # 3. The calls over them.
        local, remote = _calls(tasks, plan.reach, placement, queries, keys)
        num_tokens = int(placement.tokens[rank]) if rank < placement.num_workers else 0
        return cls(rank, num_ranks, num_tokens, q, kv, matrix, local, remote)

    @cached_property
    def read_before(self) -> list[Spans]:
        """The own keys that the calls before each one read, and after the last those of all."""
        own = (call.kv.own() for call in (*self.local, *self.remote))
        return list(accumulate(own, _both, initial=Spans(*as_ints([[]] * 3))))

    @property
    def is_one_call(self) -> bool:
        """Whether one call computes all rows as they lie, and none is sent or received."""
        sends = any(rows.send for rows in (self.q, self.kv, self.matrix))
        if len(self.local) != 1 or self.remote or sends:
            return False
        everything = ((0, 0, self.num_tokens),)
        if self.local[0].behind is not None:
            return False
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


class _Found(NamedTuple):
    """Rows [row, stop) of blocks in which the keys of a reader lie."""

    reader: Ints
    block: Ints
    row: Ints
    stop: Ints

    @property
    def rows(self) -> tuple[Ints, Ints, Ints]:
        return self.block, self.row, self.stop

    def only(self, chosen: Bools) -> _Found:
        return _Found(*(column[chosen] for column in self))


def _move_matrix(tasks: Tasks, placement: Placement, rank: int) -> PeerRows:
    pairs = list(zip(*(ranks.tolist() for ranks in expansion_moves(tasks, placement)), strict=True))
    send = {server: Rows((Run(0, 0, 1),)) for worker, server in pairs if worker == rank}
    return PeerRows(send, {worker: 1 for worker, server in pairs if server == rank}, bool(pairs))


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
    tasks: Tasks, reach: Ints, placement: Placement, queries: _Queries, keys: _Keys
) -> tuple[tuple[Call, ...], tuple[Call, ...]]:
    """Returns the local and the remote calls: one for each kind of kernel."""
    here, masks = tasks.only(queries.task), placement.masks(reach)
    sequence, behind = sequences_of(here, masks), queries_with_keys_behind(here, masks)
    document, prefixes = here.document, placement.prefixes
    last = masks.last_key_up_to_own(document, here.q_stop)
    up_to_own = _find(prefixes, keys, Spans(document, here.kv_start, last))
    own_span = Spans(document[behind.task], behind.start + 1, behind.last)
    of_behind = _find(prefixes, keys, own_span)
    # A task is remote if its queries, or some of its keys, are in a block that was received.
    needs_peers = queries.block > 0
    needs_peers[up_to_own.reader[up_to_own.block > 0]] = True
    needs_peers[behind.task[of_behind.reader[of_behind.block > 0]]] = True
    kinds = np.where(reach < 0, CAUSAL, reach)[document]
    calls: tuple[list[Call], list[Call]] = ([], [])
    for remote in (False, True):
        for kind in np.unique(kinds[needs_peers == remote]).tolist():
            chosen = (needs_peers == remote) & (kinds == kind)
            packed, later = chosen[sequence.task], behind.only(chosen[behind.task])
            read = [up_to_own.only(chosen[up_to_own.reader])]
            read.append(of_behind.only(chosen[behind.task][of_behind.reader]))
            first = queries.row[chosen]
            calls[remote].append(
                Call(
                    mask=Mask(kind - BAND + 1 if kind > BAND else kind),
                    q=Rows.of(queries.block[chosen], first, first + here.queries[chosen]),
                    kv=Rows.of(*map(np.concatenate, zip(*(r.rows for r in read), strict=True))),
                    q_offsets=cumulative(sequence.queries[packed]),
                    kv_offsets=cumulative(sequence.keys[packed]),
                    behind=mirrored(later, here, chosen, kind) if len(later.task) else None,
                )
            )
    return tuple(calls[0]), tuple(calls[1])


def _find(prefixes: Prefixes, keys: _Keys, needs: Spans) -> _Found:
    """Returns where spans of keys lie; one may lie in several places."""
    span, owned = prefixes.owned(needs)
    found = overlaps(owned, Spans(keys.document, keys.start, keys.stop))
    row = keys.row[found.right] + found.start - keys.start[found.right]
    stop = row + found.stop - found.start
    return _Found(span[found.left], keys.block[found.right], row, stop)


def _send(receiver: Ints, row: Ints, size: Ints) -> dict[int, Rows]:
    """Returns own rows by receiver, from spans that are sorted by receiver."""
    ranks, first = np.unique(receiver, return_index=True)
    bounds = pairwise([*first.tolist(), len(receiver)])
    own, stop = np.zeros_like(row), row + size
    return {
        rank: Rows.of(own[a:b], row[a:b], stop[a:b])
        for rank, (a, b) in zip(ranks.tolist(), bounds, strict=True)
    }


def _both(some: Spans, others: Spans) -> Spans:
    return union(Spans(*map(np.concatenate, zip(some, others, strict=True))))


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
