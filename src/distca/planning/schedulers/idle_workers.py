"""Step 2 of the scheduler: workers that do not serve give away their shards."""

from __future__ import annotations

import numpy as np

from distca.planning.problem import DoesNotFitError
from distca.planning.schedulers.cuts import Piece
from distca.planning.schedulers.ledger import Ledger
from distca.planning.schedulers.shedding import find_cut


def empty_idle_workers(ledger: Ledger) -> None:
    """Moves every shard of a worker of speed 0, the heaviest first.

    A shard moves whole if a server has the headroom, else in pieces, else above the bound.
    """
    shards = ledger.shards
    idle = np.flatnonzero(shards.devices.speed[shards.placement.worker] == 0)
    for shard in idle[np.argsort(-shards.load[idle], kind="stable")].tolist():
        if _move_whole(ledger, shard):
            continue
        cut = find_cut(ledger, shard, keep=0)
        if cut is not None:
            ledger.move(shard, cut.pieces)
        elif not _move_whole(ledger, shard, above_bound=True):
            raise DoesNotFitError(
                f"tokens {shards.span[shard]} of document {shards.document[shard]} live on rank"
                f" {shards.home[shard]}, which does not serve, and no server has the memory for"
                " them: give the servers more memory, or more servers"
            )


def _move_whole(ledger: Ledger, shard: int, *, above_bound: bool = False) -> bool:
    """Moves a whole shard to a server that has its keys, else to the one with most headroom.

    above_bound: whether to consider all servers, with or without headroom.
    """
    shards, loads = ledger.shards, ledger.loads
    load, document = int(shards.load[shard]), shards.document[shard]
    if above_bound:
        servers = shards.devices.serving.tolist()
    else:
        servers = [rank for rank in ledger.keys.holders(document) if shards.serves(rank)]
        servers += [headroom.server for headroom in loads.headrooms[-1:]]
    memory_bytes = shards.memory_bytes(document, shards.span[shard])
    for server in sorted(servers, key=lambda server: (-loads.headroom(server), server)):
        has_headroom = above_bound or load <= loads.headroom(server)
        if has_headroom and memory_bytes <= ledger.free_bytes(server):
            ledger.move(shard, [Piece(*shards.span[shard], server, load)])
            return True
    return False
