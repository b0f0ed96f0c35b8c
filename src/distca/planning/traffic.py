"""What has to be sent for a set of tasks, and how many bytes that is.

Queries are sent from home to server, and outputs back. Keys and values are sent once to each server
that needs them and does not hold them, no matter how many of its tasks use them.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from distca.planning.models import ModelShape
from distca.planning.placement import Placement
from distca.planning.spans import Bools, Ints, Spans, covered, overlaps, union
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
    needs = _keys_on_servers(tasks, placement)
    server, document = np.divmod(needs.group, max(placement.num_documents, 1))
    # 2. The shards that hold them.
    found = overlaps(Spans(document, needs.start, needs.stop), placement.spans)
    shard = placement.by_document[found.right]
    source, server = placement.worker[shard], server[found.left]
    # 3. Keys that live on the server already are not sent.
    away = source != server
    return KeyMoves(shard[away], found.start[away], found.stop[away], source[away], server[away])


def expansion_moves(tasks: Tasks, placement: Placement) -> tuple[Ints, Ints]:
    """Returns who sends the matrix that expands latents to whom: workers and dedicated servers.

    Dedicated servers have no weights. Each of them that has tasks gets the matrix from one worker.
    """
    workers = placement.num_workers
    server = np.unique(tasks.server[tasks.server >= workers])
    return (server - workers) % max(workers, 1), server


def needs_peers(tasks: Tasks, placement: Placement) -> Bools:
    """[tasks] Returns whether queries or keys of a task have to be received from other ranks."""
    held = num_keys_on(tasks.server, tasks.key_spans, placement)
    waits: Bools = (tasks.home != tasks.server) | (held < tasks.keys)
    return waits


def num_keys_on(rank: Ints, keys: Spans, placement: Placement) -> Ints:
    """[spans] Returns how many keys of each span live on a rank."""
    count = placement.num_documents
    order = np.lexsort((placement.start, placement.document, placement.worker))
    own = Spans(
        (placement.worker * count + placement.document)[order],
        placement.start[order],
        placement.stop[order],
    )
    span, parts = placement.prefixes.owned(keys)
    met = overlaps(Spans(rank[span] * count + parts.group, parts.start, parts.stop), own)
    held = np.bincount(span[met.left], met.stop - met.start, minlength=len(rank))
    return held.astype(np.int64)


def memory_bytes(tasks: Tasks, placement: Placement, shape: ModelShape, num_ranks: int) -> Ints:
    """[ranks] Returns the bytes of one layer: local q, k, v and o, keys fetched for tasks at home,
    and for every received task q, o and a packed copy of its keys.
    """
    used = np.zeros(num_ranks, np.int64)
    used[: placement.num_workers] = placement.tokens * shape.token_bytes
    moved = tasks.moved
    size = tasks.queries[moved] * shape.qo_bytes + tasks.keys[moved] * shape.kv_memory_bytes
    np.add.at(used, tasks.server[moved], size)
    fetched = key_moves(tasks.only(tasks.home == tasks.server), placement)
    np.add.at(used, fetched.server, (fetched.stop - fetched.start) * shape.kv_memory_bytes)
    return used


def flows(tasks: Tasks, placement: Placement, shape: ModelShape, *, backward: bool) -> Flows:
    """Returns what is sent for tasks.

    Forward: q, k and v out, o back. Backward: q, o, do, log-sum-exp, k and v out, dq, dk and dv
    back, because servers keep no tensors of the forward pass. Queries come first, then keys, then
    the matrices that expand latents.
    """
    return _flows(tasks, key_moves(tasks, placement), placement, shape, backward=backward)


def _flows(
    tasks: Tasks, keys: KeyMoves, placement: Placement, shape: ModelShape, *, backward: bool
) -> Flows:
    moved = tasks.moved
    q_out, q_back = shape.q_bytes, shape.o_bytes
    if backward:
        q_out, q_back = shape.q_bytes + 2 * shape.o_bytes + LSE_BYTES * shape.heads, shape.q_bytes
    num_q, kv_bytes = tasks.queries[moved], (keys.stop - keys.start) * shape.kv_bytes
    with_latents = tasks if shape.latent_dim else tasks.only(tasks.server < 0)
    giver, without_weights = expansion_moves(with_latents, placement)
    expansion = np.full_like(giver, shape.expansion_bytes)
    return Flows(
        source=np.concatenate([tasks.home[moved], keys.source, giver]),
        target=np.concatenate([tasks.server[moved], keys.server, without_weights]),
        out=np.concatenate([num_q * q_out, kv_bytes, expansion]),
        back=np.concatenate([num_q * q_back, kv_bytes * backward, expansion * backward]),
    )


def traffic(
    tasks: Tasks, placement: Placement, shape: ModelShape, node: Ints, *, backward: bool = False
) -> Traffic:
    """Adds up what is sent for tasks by rank. node: [ranks]"""
    distinct = _keys_on_servers(tasks, placement)
    keys, no_keys = _moved_keys(distinct, placement, node), KeyMoves(*np.zeros((5, 0), np.int64))
    others = _flows(tasks, no_keys, placement, shape, backward=backward)
    out, back = shape.kv_bytes, shape.kv_bytes * backward
    send, recv = keys.sent * out + keys.received * back, keys.received * out + keys.sent * back
    for sender, receiver, num_bytes in (
        (others.source, others.target, others.out),
        (others.target, others.source, others.back),
    ):
        np.add.at(send, sender, num_bytes)
        np.add.at(recv, receiver, num_bytes)
    crossing = node[others.source] != node[others.target]
    cross_node = int((others.out + others.back)[crossing].sum()) + keys.crossing * (out + back)
    copied = int(tasks.keys.sum() - (distinct.stop - distinct.start).sum())
    return Traffic(send, recv, cross_node, copied * shape.kv_memory_bytes)


class _MovedKeys(NamedTuple):
    """How many keys ranks send and receive, [ranks], and how many cross nodes."""

    sent: Ints
    received: Ints
    crossing: int


def _moved_keys(needs: Spans, placement: Placement, node: Ints) -> _MovedKeys:
    """Counts the keys of ``key_moves``, by sums over overlaps instead of one by one.

    If documents are dealt over many workers, each worker needs keys of nearly all others.

    needs: the keys that servers need; groups are (server, document).
    """
    count = max(placement.num_documents, 1)
    server, document = np.divmod(needs.group, count)
    # Most documents are whole on one worker, and the scheduler counts the others alone.
    is_needed = np.zeros(count, bool)
    is_needed[document] = True
    some = np.flatnonzero(is_needed[placement.spans.group])
    shards = Spans(*(column[some] for column in placement.spans))  # by document
    worker = placement.worker[placement.by_document[some]]
    order = np.argsort(worker * count + shards.group, kind="stable")
    own = Spans((worker * count + shards.group)[order], shards.start[order], shards.stop[order])
    met = overlaps(needs, own)
    held = met.stop - met.start  # keys that live on the server already
    received, sent = np.zeros((2, len(node)), np.int64)
    np.add.at(received, server, needs.stop - needs.start)
    np.subtract.at(received, server[met.left], held)
    np.add.at(sent, worker, covered(shards, Spans(document, needs.start, needs.stop)))
    np.subtract.at(sent, worker[order][met.right], held)
    if not np.any(node != node[0]):
        return _MovedKeys(sent, received, 0)
    homes = Spans(node[worker] * count + shards.group, shards.start, shards.stop)
    near = covered(homes, Spans(node[server] * count + document, needs.start, needs.stop))
    return _MovedKeys(sent, received, int(sent.sum() - (near.sum() - held.sum())))


def _keys_on_servers(tasks: Tasks, placement: Placement) -> Spans:
    """Returns the keys that each server needs, each key once; groups are (server, document).

    A prefix that several documents share counts once, as keys of the document that has it.
    """
    task, keys = placement.prefixes.owned(tasks.key_spans)
    group = tasks.server[task] * placement.num_documents + keys.group
    return union(Spans(group, keys.start, keys.stop))
