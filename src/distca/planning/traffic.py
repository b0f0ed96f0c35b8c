"""What has to move for a set of tasks, and how many bytes that is.

Queries travel from home to server and outputs back. Keys and values travel once to each server
that needs them and does not hold them, however many of its tasks use them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distca.planning.models import ModelShape
from distca.planning.placement import Placement
from distca.planning.spans import Bools, Ints, Spans, overlaps, union
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
class Flows:
    """Who sends how much to whom in one layer and direction: there, and then the way back."""

    source: Ints
    target: Ints
    out: Ints  # bytes from source to target, before the kernel
    back: Ints  # bytes from target to source, after it


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


def needs_peers(tasks: Tasks, placement: Placement) -> Bools:
    """[tasks] Whether a task waits for anything: its queries, or some of its keys."""
    count = placement.num_documents
    order = np.lexsort((placement.start, placement.document, placement.worker))
    own = Spans(
        (placement.worker * count + placement.document)[order],
        placement.start[order],
        placement.stop[order],
    )
    wanted = Spans(tasks.server * count + tasks.document, tasks.kv_start, tasks.kv_stop)
    met = overlaps(wanted, own)
    held = np.bincount(met.left, met.stop - met.start, minlength=len(tasks))
    waits: Bools = (tasks.home != tasks.server) | (held < tasks.keys)
    return waits


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


def forward_flows(tasks: Tasks, placement: Placement, shape: ModelShape, gather: int = 0) -> Flows:
    """q and kv out, o back. ``gather``: all keys of groups of so many workers, needed or not."""
    return _flows(tasks, placement, shape, gather, (shape.q_bytes, shape.q_bytes), (1, 0))


def backward_flows(tasks: Tasks, placement: Placement, shape: ModelShape, gather: int = 0) -> Flows:
    """Devices keep nothing: q, o, do, log-sum-exp and kv out; dq and dkv back."""
    out = 3 * shape.q_bytes + LSE_BYTES * shape.heads
    return _flows(tasks, placement, shape, gather, (out, shape.q_bytes), (1, 1))


def forward_traffic(
    tasks: Tasks, placement: Placement, shape: ModelShape, node: Ints, gather: int = 0
) -> Traffic:
    return _by_rank(forward_flows(tasks, placement, shape, gather), tasks, shape, node)


def backward_traffic(
    tasks: Tasks, placement: Placement, shape: ModelShape, node: Ints, gather: int = 0
) -> Traffic:
    return _by_rank(backward_flows(tasks, placement, shape, gather), tasks, shape, node)


def _by_rank(flows: Flows, tasks: Tasks, shape: ModelShape, node: Ints) -> Traffic:
    send, recv = np.zeros((2, len(node)), np.int64)
    np.add.at(send, flows.source, flows.out)
    np.add.at(recv, flows.target, flows.out)
    np.add.at(send, flows.target, flows.back)
    np.add.at(recv, flows.source, flows.back)
    crossing = node[flows.source] != node[flows.target]
    copies = _copied_keys(tasks) * shape.kv_bytes
    return Traffic(send, recv, int((flows.out + flows.back)[crossing].sum()), copies)


def _flows(
    tasks: Tasks,
    placement: Placement,
    shape: ModelShape,
    gather: int,
    query_bytes: tuple[int, int],
    key_times: tuple[int, int],
) -> Flows:
    """query_bytes: of a query token, out and back. key_times: how often keys travel, likewise."""
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
    out, back = (
        np.concatenate([num_q * q, num_keys * (times * shape.kv_bytes)])
        for q, times in zip(query_bytes, key_times, strict=True)
    )
    return Flows(source, target, out, back)


def _all_gather(placement: Placement, group: int) -> tuple[Ints, Ints]:
    """Every ordered pair of different workers inside a group: each sends all its keys to each."""
    worker = np.arange(placement.num_workers, dtype=np.int64)
    source = np.repeat(worker, group)
    target = source // group * group + np.tile(np.arange(group), placement.num_workers)
    return source[source != target], target[source != target]


def _copied_keys(tasks: Tasks) -> int:
    """Keys over all tasks, less the different keys on each server."""
    num_documents = int(tasks.document.max(initial=0)) + 1
    needs = union(
        Spans(tasks.server * num_documents + tasks.document, tasks.kv_start, tasks.kv_stop)
    )
    return int(tasks.keys.sum() - (needs.stop - needs.start).sum())
