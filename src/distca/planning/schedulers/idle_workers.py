"""Step 2 of the scheduler: a worker that does not serve gives away all its shards."""

from collections.abc import Iterator

import numpy as np

from distca.planning.problem import DoesNotFitError
from distca.planning.schedulers.ledger import Ledger
from distca.planning.schedulers.shedding import find_cut
from distca.planning.schedulers.short_documents import deal_documents


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
    loads, keys = ledger.loads, ledger.keys
    if above_bound:
        servers = ledger.problem.devices.serving.tolist()
    else:
        yield from (headroom.server for headroom in loads.headrooms[-1:])
        servers = [rank for rank in keys.possible_holders(document) if loads.serves(rank)]
    for server in sorted(servers, key=lambda server: (-loads.headroom(server), server)):
        if above_bound or keys.holds(document, server):
            yield server
