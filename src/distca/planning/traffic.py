"""What has to move for a set of tasks, and how many bytes that is.

Queries travel from home to server and outputs back. Keys and values travel once to each server
that needs them and does not hold them, however many of its tasks use them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distca.planning.models import ModelShape
from distca.planning.placement import Placement
from distca.planning.spans import Ints, Spans, overlaps, union
from distca.planning.tasks import Tasks

LSE_BYTES = 4  # one float per head and query


@dataclass(frozen=True, eq=False)
class KeyMoves:
    """Spans of keys and values, each from the worker that holds it to a server that needs it."""

    shard: Ints  # index into the placement's shards
    start: Ints
    stop: Ints
    source: Ints
    server: Ints


@dataclass(frozen=True, eq=False)
class Traffic:
    """Bytes of one layer and direction, by rank."""

    send: Ints
    recv: Ints
    cross_node: int  # of the total, what leaves a node
    key_copies: int  # keys that a fused kernel call needs more than once on one server

    @property
    def total(self) -> int:
        return int(self.send.sum())

    @property
    def worst(self) -> int:
        """The busiest port: the larger of sent and received over all ranks."""
        return int(max(self.send.max(), self.recv.max()))


def key_moves(tasks: Tasks, placement: Placement) -> KeyMoves:
    """Keys needed on each server, less those that live there."""
    # 1. What each (server, document) needs, each key once.
    needs = union(
        Spans(
            tasks.server * placement.num_documents + tasks.document, tasks.kv_start, tasks.kv_stop
        )
    )
    server, document = np.divmod(needs.group, max(placement.num_documents, 1))
    # 2. Who holds it.
    found = overlaps(Spans(document, needs.start, needs.stop), placement.spans)
    shard = placement.by_document[found.right]
    source, server = placement.worker[shard], server[found.left]
    # 3. What already lives on the server stays.
    away = source != server
    return KeyMoves(shard[away], found.start[away], found.stop[away], source[away], server[away])


def memory_bytes(tasks: Tasks, placement: Placement, shape: ModelShape, num_ranks: int) -> Ints:
    """What one layer takes on each rank: own q, k, v, o; fetched keys; and, of every task that
    came from elsewhere, q, o and a packed copy of its keys."""
    used = np.zeros(num_ranks, np.int64)
    used[: placement.num_workers] = placement.tokens * (2 * shape.q_bytes + shape.kv_bytes)
    moved = tasks.moved
    weight = 2 * tasks.queries[moved] * shape.q_bytes + tasks.keys[moved] * shape.kv_bytes
    np.add.at(used, tasks.server[moved], weight)
    fetched = key_moves(tasks.only(tasks.home == tasks.server), placement)
    np.add.at(used, fetched.server, (fetched.stop - fetched.start) * shape.kv_bytes)
    return used


def forward_traffic(
    tasks: Tasks, placement: Placement, shape: ModelShape, node: Ints, gather: int = 0
) -> Traffic:
    """q and kv out, o back."""
    return _traffic(
        tasks, placement, shape, node, gather, (shape.q_bytes, shape.q_bytes), back=False
    )


def backward_traffic(
    tasks: Tasks, placement: Placement, shape: ModelShape, node: Ints, gather: int = 0
) -> Traffic:
    """Servers keep nothing: q, o, do, log-sum-exp and kv out; dq and dkv back."""
    out = 3 * shape.q_bytes + LSE_BYTES * shape.heads
    return _traffic(tasks, placement, shape, node, gather, (out, shape.q_bytes), back=True)


def _traffic(
    tasks: Tasks,
    placement: Placement,
    shape: ModelShape,
    node: Ints,
    gather: int,
    query_bytes: tuple[int, int],
    *,
    back: bool,
) -> Traffic:
    """query_bytes: per query token, to the server and back. back: dkv return as well."""
    moved, keys = tasks.moved, key_moves(tasks, placement)
    source, target, num_keys = keys.source, keys.server, keys.stop - keys.start
    if gather:
        outside = source // gather != target // gather
        pairs = _all_gather(placement, gather)
        source = np.concatenate([source[outside], pairs[0]])
        target = np.concatenate([target[outside], pairs[1]])
        num_keys = np.concatenate([num_keys[outside], placement.tokens[pairs[0]]])
    num_q = tasks.queries[moved]
    source = np.concatenate([tasks.home[moved], source])
    target = np.concatenate([tasks.server[moved], target])
    out = np.concatenate([num_q * query_bytes[0], num_keys * shape.kv_bytes])
    home = np.concatenate([num_q * query_bytes[1], num_keys * (shape.kv_bytes if back else 0)])
    send, recv = np.zeros((2, len(node)), np.int64)
    np.add.at(send, source, out)
    np.add.at(recv, target, out)
    np.add.at(send, target, home)
    np.add.at(recv, source, home)
    crossing = node[source] != node[target]
    copies = _copied_keys(tasks, placement.num_documents) * shape.kv_bytes
    return Traffic(send, recv, int((out + home)[crossing].sum()), copies)


def _all_gather(placement: Placement, group: int) -> tuple[Ints, Ints]:
    """Every ordered pair of different workers inside a group: each sends all its keys to each."""
    worker = np.arange(placement.num_workers, dtype=np.int64)
    source = np.repeat(worker, group)
    target = source // group * group + np.tile(np.arange(group), placement.num_workers)
    return source[source != target], target[source != target]


def _copied_keys(tasks: Tasks, num_documents: int) -> int:
    """Keys over all tasks, less the different keys on each server."""
    needs = union(
        Spans(tasks.server * num_documents + tasks.document, tasks.kv_start, tasks.kv_stop)
    )
    return int(tasks.keys.sum() - (needs.stop - needs.start).sum())
