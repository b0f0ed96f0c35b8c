"""The ranks of a run after dedicated servers are lost: new groups without them.

    context = without_lost_servers(context)   # on all ranks that are left, between steps

Servers have no weights and no state, so the run can go on without them. Only the groups that they
belonged to are made again: those for attention, and that of all ranks. The groups of FSDP, tensor
and pipeline parallelism and of checkpoints consist of workers and stay.

The hub of the old groups knows who is left, and keeps watching until all ranks have connected to
the new one. If one more server is lost before that, ranks start over with those that are left. A
rank that waits for the lost one in the meantime has no way out of that, so it ends the run with a
sentence (``distca.runtime.lost_ranks``).
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from threading import Thread

import torch.distributed as dist

from distca.dispatch.peers import Peers
from distca.dispatch.transports.base import ExchangeError
from distca.runtime.host_ranks import HostRanks
from distca.runtime.lost_ranks import regrouping, watch
from distca.runtime.mesh import RankContext, connect, new_attention_group

_LOOK_S = 0.05


class NotNeededError(Exception):
    """Raised on a server that cannot serve any more, since a server of another tp index is lost."""


def without_lost_servers(context: RankContext) -> RankContext:
    """Returns the context without lost servers; all ranks that are left call it.

    Raises PeerLostError if a worker is lost, and NotNeededError on a server without a task.
    """
    peers = context.host.peers
    assert peers is not None, "this run was not started to survive a loss"
    while True:
        left = peers.survivors()
        servers = _whole_sets(context.servers, left, context.parallel.tp)
        workers = range(context.parallel.num_workers)
        for lost in peers.losses:
            if lost.rank in workers:
                raise lost
        if context.rank not in {*workers, *servers}:
            peers.close()  # leaves with a word, so that it is not lost
            raise NotNeededError
        with regrouping():
            if any(lost.rank in servers for lost in peers.losses):
                continue  # one more is lost since the answer
            new = _regroup(context, servers)
            if _all_have_come(new.host, peers):
                break
            _close(new)
    watch(new.host.peers)  # type: ignore[arg-type]
    _close(context)
    return new


def _whole_sets(servers: Sequence[int], left: Sequence[int], tp: int) -> tuple[int, ...]:
    """Returns the servers that can go on: with tensor parallelism, one of every tp index."""
    sets = (servers[start : start + tp] for start in range(0, len(servers), tp))
    return tuple(rank for one in sets if set(one) <= set(left) for rank in one)


def _regroup(context: RankContext, servers: tuple[int, ...]) -> RankContext:
    parallel = replace(context.parallel, servers=len(servers))
    attention_group = new_attention_group(parallel, servers)
    connect([attention_group], context.device)
    ranks = [*range(parallel.num_workers), *servers]
    world_group = dist.new_group(ranks, backend="gloo")
    return replace(
        context,
        parallel=parallel,
        attention_group=attention_group,
        world_group=world_group,
        servers=servers,
        host=HostRanks(world_group, Peers.of(world_group)),
    )


def _all_have_come(host: HostRanks, before: Peers) -> bool:
    """Waits until all ranks are connected; returns false on all if one more is lost before.

    before: the ranks as they were, whose hub notices also the loss of a rank that never came.
    """
    assert host.peers is not None
    before.on_loss(lambda lost: host.peers.tell_lost(lost.rank))  # type: ignore[union-attr]
    try:
        host.any(False)
    except ExchangeError:
        return False
    return True


def _close(context: RankContext) -> None:
    """Closes the groups that contained servers, and the connections of their ranks."""
    peers = context.host.peers
    assert peers is not None
    peers.close()
    groups = [context.attention_group, context.world_group]
    for group in groups:
        dist.destroy_process_group(group)
    abandoned, peers.abandoned = peers.abandoned, []
    Thread(target=_hold, args=(groups, abandoned), daemon=True).start()


def _hold(groups: Sequence[dist.ProcessGroup], abandoned: Sequence[dist.Work]) -> None:
    """Keeps groups until their last work has ended, since the end of a group waits for that.

    It ends as soon as the other ranks have closed their connections.
    """
    while not all(work.is_completed() for work in abandoned):
        time.sleep(_LOOK_S)
