"""What has to be sent for a set of tasks, and how many bytes that is.

Queries are sent from home to server, and outputs back. Keys and values are sent once to each server
that needs them and does not hold them, no matter how many of its tasks use them.
"""

from dataclasses import dataclass

import numpy as np

from distca.planning.models import ModelShape
from distca.planning.placement import Placement
from distca.planning.spans import Bools, Ints, Spans, overlaps, union
from distca.planning.tasks import Tasks

LSE_BYTES = 4  # log-sum-exp: one float32 per head and query


@dataclass(frozen=True, eq=False)
class KeyMoves:
    """Spans of keys and values, each sent from its worker to a server that needs it."""

    shard: Ints  # index of the shard in the placement
    start: Ints
    stop: Ints
    source: Ints
    server: Ints


@dataclass(frozen=True, eq=False)
class Flows:
    """Bytes between pairs of ranks in one layer and direction.

    A pair of ranks may occur several times.
    """

    source: Ints
    target: Ints
    out: Ints  # bytes from source to target, dispatched before the kernel
    back: Ints  # bytes from target to source, combined after the kernel


@dataclass(frozen=True, eq=False)
class Traffic:
    """Bytes that each rank sends and receives in one layer and direction."""

    send: Ints  # [ranks]
    recv: Ints  # [ranks]
    cross_node: int  # the part of the total that is sent between nodes
    key_copies: int  # bytes of keys that fused kernel calls hold more than once on a server

    @property
    def total(self) -> int:
        return int(self.send.sum())

    @property
    def worst(self) -> int:
        """The most bytes that any rank sends or receives."""
        return int(max(self.send.max(), self.recv.max()))


def key_moves(tasks: Tasks, placement: Placement) -> KeyMoves:
    """Returns the keys that servers need and do not hold, each with its source."""
    # 1. The keys that each server needs of each document, each key once.
    needs = union(
        Spans(
            tasks.server * placement.num_documents + tasks.document, tasks.kv_start, tasks.kv_stop
        )
    )
    server, document = np.divmod(needs.group, max(placement.num_documents, 1))
    # 2. The shards that hold them.
    found = overlaps(Spans(document, needs.start, needs.stop), placement.spans)
    shard = placement.by_document[found.right]
    source, server = placement.worker[shard], server[found.left]
    # 3. Keys that live on the server already are not sent.
    away = source != server
    return KeyMoves(shard[away], found.start[away], found.stop[away], source[away], server[away])


def needs_peers(tasks: Tasks, placement: Placement) -> Bools:
    """[tasks] Returns whether queries or keys of a task have to be received from other ranks."""
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
    """[ranks] Returns the bytes of one layer: local q, k, v and o, keys fetched for tasks at home,
    and for every received task q, o and a packed copy of its keys.
    """
    used = np.zeros(num_ranks, np.int64)
    used[: placement.num_workers] = placement.tokens * (2 * shape.q_bytes + shape.kv_bytes)
    moved = tasks.moved
    size = 2 * tasks.queries[moved] * shape.q_bytes + tasks.keys[moved] * shape.kv_bytes
    np.add.at(used, tasks.server[moved], size)
    fetched = key_moves(tasks.only(tasks.home == tasks.server), placement)
    np.add.at(used, fetched.server, (fetched.stop - fetched.start) * shape.kv_bytes)
    return used


def forward_flows(tasks: Tasks, placement: Placement, shape: ModelShape, gather: int = 0) -> Flows:
    """Returns the flows of the forward pass: q, k and v out, o back.

    gather: if above 0, groups of this many workers all-gather their keys, needed or not.
    """
    return _flows(tasks, placement, shape, gather, (shape.q_bytes, shape.q_bytes), (1, 0))


def backward_flows(tasks: Tasks, placement: Placement, shape: ModelShape, gather: int = 0) -> Flows:
    """Returns the flows of the backward pass: q, o, do, log-sum-exp, k and v out; dq, dk, dv back.

    Servers keep no tensors of the forward pass.
    """
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
    """Returns the flows of tasks.

    query_bytes: bytes of a query token, (out, back).
    key_times: how many times the bytes of a key are sent, (out, back).
    """
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
    """Returns (source, target) of every ordered pair of different workers inside a group."""
    worker = np.arange(placement.num_workers, dtype=np.int64)
    source = np.repeat(worker, group)
    target = source // group * group + np.tile(np.arange(group), placement.num_workers)
    return source[source != target], target[source != target]


def _copied_keys(tasks: Tasks) -> int:
    """Returns the keys of all tasks less the distinct keys on each server."""
    num_documents = int(tasks.document.max(initial=0)) + 1
    needs = union(
        Spans(tasks.server * num_documents + tasks.document, tasks.kv_start, tasks.kv_stop)
    )
    return int(tasks.keys.sum() - (needs.stop - needs.start).sum())
