"""Short documents leave their home in groups, because moving thousands one by one takes seconds.

A group is a run of whole documents of one worker that one server takes. It is found with cumulative
sums, so the number of steps depends on the servers and not on the documents.
"""

import bisect
from collections.abc import Iterable

import numpy as np

from distca.planning.schedulers.ledger import Ledger
from distca.planning.spans import Ints, as_ints, cumulative

# A surplus of more than this many times the heaviest shard that is left is shed in groups.
MANY = 4
LIGHT = 1 / 64  # load of a document, relative to a server's mean headroom, dealt in groups


def shed_whole_documents(ledger: Ledger, ranks: Iterable[int]) -> None:
    """Moves documents that are lighter than the surplus of their ranks. No cut is evaluated."""
    for rank in ranks:
        while shed_documents(ledger, rank) or shed_document(ledger, rank):
            pass


def shed_documents(ledger: Ledger, rank: int) -> bool:
    """Moves a surplus of many short documents, the heaviest first, to the largest headrooms.

    The heaviest documents move the fewest bytes for their load. Servers of the same node come
    first. Returns whether anything was moved: what is left is less than the next document or larger
    than all headrooms.
    """
    shards, loads = ledger.shards, ledger.loads
    surplus = loads.surplus(rank)
    uncut = ledger.uncut(rank)
    if not len(uncut) or surplus <= MANY * int(shards.load[uncut[0]]):
        return False
    documents = uncut[shards.is_document[uncut]]
    if not len(documents):
        return False
    servers = sorted(
        (not shards.same_node(headroom.server, rank), -headroom.load, headroom.server)
        for headroom in loads.headrooms
    )
    load = cumulative(shards.load[documents])
    memory = cumulative(ledger.memory_of_documents(documents))
    ends, first = [0], 0
    for _, negative_headroom, server in servers:
        left = min(-negative_headroom, surplus - int(load[first]))
        by_load = load.searchsorted(load[first] + left, side="right")
        by_memory = memory.searchsorted(memory[first] + ledger.free_bytes[server], side="right")
        first = max(int(min(by_load, by_memory)) - 1, first)
        ends.append(first)
    server_of = np.repeat(as_ints([server for *_, server in servers]), np.diff(ends))
    ledger.move_documents(documents[:first], server_of)
    return first > 0


def shed_document(ledger: Ledger, rank: int) -> bool:
    """Moves the heaviest shard that is left if it is a document lighter than the surplus.

    It goes to the smallest headroom that holds it without raising the peak traffic, to save large
    ones, else to the largest. Returns whether it was moved. Cuts of such a document need not be
    evaluated, since all of it leaves; but where there are several nodes, servers differ.
    """
    shards, headrooms = ledger.shards, ledger.loads.headrooms
    uncut = ledger.uncut(rank)
    if not len(uncut) or not headrooms or shards.several_nodes:
        return False
    shard, load = int(uncut[0]), int(shards.load[uncut[0]])
    if load >= ledger.loads.surplus(rank) or not shards.is_document[shard]:
        return False
    shape, tokens = ledger.problem.shape, shards.span(shard)[1]
    arriving = tokens * (shape.q_bytes + shape.kv_bytes)
    largest = headrooms[-1].server
    limit = max(
        ledger.peak_traffic, ledger.received[largest] + arriving, ledger.sent[rank] + arriving
    )
    for _, server in headrooms[bisect.bisect_left(headrooms, (load, -1)) :]:
        fits = ledger.free_bytes[server] >= tokens * shape.token_bytes
        if fits and ledger.received[server] + arriving <= limit:
            ledger.move_whole(shard, server)
            return True
    return False


def deal_documents(ledger: Ledger, idle: Ints) -> None:
    """Moves the short documents among shards of idle workers, to all servers by their headroom.

    Documents stay in order, so that every server gets long and short ones alike. A server whose
    memory does not suffice for its share takes none: the caller moves what is left.

    idle: shards of workers that do not serve.
    """
    shards, loads = ledger.shards, ledger.loads
    headrooms = loads.headrooms
    if not headrooms:
        return
    total_headroom = sum(headroom.load for headroom in headrooms)
    light = shards.load[idle] <= LIGHT * total_headroom / len(headrooms)
    documents = idle[shards.is_document[idle] & light]
    load = cumulative(shards.load[documents])
    shares = np.cumsum([headroom.load for headroom in headrooms]) / total_headroom
    ends = load.searchsorted(shares * min(int(load[-1]), total_headroom), side="right") - 1
    server = np.repeat(
        as_ints([headroom.server for headroom in headrooms]), np.diff(ends, prepend=0)
    )
    documents = documents[: len(server)]
    needed = np.zeros(len(ledger.free_bytes), np.int64)
    np.add.at(needed, server, ledger.memory_of_documents(documents))
    fits = (needed <= ledger.free_bytes)[server]
    ledger.move_documents(documents[fits], server[fits])
