"""The ranks of a run after dedicated servers are lost, leave or join: new groups.

    new = regroup(context)   # on all ranks that are left, between steps

Servers have no weights and no state, so a run can go on without them, and with others. Only the
groups that they belong to are made again (``runtime.new_groups``): those for attention, and that of
all ranks. The groups of FSDP, tensor and pipeline parallelism and of checkpoints consist of workers
and stay.

The hub of the old groups knows who is left and who wants to join, and keeps watching until all
ranks have connected to the new one. If one more is lost before that, ranks start over with those
that are left.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from threading import Thread
from typing import Any

import torch.distributed as dist

from distca.dispatch.peer_news import Members
from distca.dispatch.transports.base import ExchangeError
from distca.runtime.lost_ranks import spare, watch
from distca.runtime.mesh import RankContext
from distca.runtime.new_groups import Roster, make_groups, root_store, store_of

_ATTEMPTS = 5  # that fail although nobody is lost, such as without a network between two ranks
_LOOK_S = 0.05


class NotNeededError(Exception):
    """Raised on a server without a task: it leaves, or one of another tp index is lost."""


def regroup(context: RankContext, state: dict[str, Any] | None = None) -> RankContext:
    """Returns the context with new groups; all ranks that are left call it.

    state: what new servers need to know of the run; with None, candidates go on waiting.

    Raises PeerLostError if a worker is lost, and NotNeededError on a server without a task.
    """
    peers = context.host.peers
    assert peers is not None, "this run was not started to survive a loss"
    root, failed = root_store(context.world_group.get_group_store()), 0
    while failed < _ATTEMPTS:
        num_losses = len(peers.losses)
        members = peers.regroup(admit=state is not None)
        for lost in peers.losses:
            if lost.rank < context.parallel.num_workers:
                raise lost
        if context.rank == 0:
            _roster(context, members, state or {}).write(store_of(root, members.name))
        groups = make_groups(
            members,
            peers,
            root,
            context.parallel,
            context.device,
            lambda roster: context.rank if _takes_part(context, roster) else None,
        )
        if groups is None:
            failed += len(peers.losses) == num_losses
            continue
        if groups.rank is None:
            leave(context)
        assert groups.attention is not None
        assert groups.world is not None
        servers = groups.roster.servers
        new = replace(
            context,
            parallel=replace(context.parallel, servers=len(servers)),
            attention_group=groups.attention,
            world_group=groups.world,
            servers=servers,
            host=groups.host,
        )
        watch(groups.host.peers)  # type: ignore[arg-type]
        spare(servers)
        return new
    raise ExchangeError(f"ranks {members.ranks} have failed to connect {_ATTEMPTS} times")


def leave(context: RankContext) -> None:
    """Leaves with a word, so that this server is not lost. Raises NotNeededError."""
    assert context.host.peers is not None
    context.host.peers.close()
    raise NotNeededError


def close(context: RankContext) -> None:
    """Closes the groups that contained servers, and the connections of their ranks."""
    peers = context.host.peers
    assert peers is not None
    peers.close()
    groups = [context.attention_group, context.world_group]
    for group in groups:
        dist.destroy_process_group(group)
    abandoned, peers.abandoned = peers.abandoned, []
    Thread(target=_hold, args=(groups, abandoned), daemon=True).start()


def _takes_part(context: RankContext, roster: Roster) -> bool:
    return not context.only_serves or context.rank in roster.servers


def _roster(context: RankContext, members: Members, state: dict[str, Any]) -> Roster:
    """Returns who goes on; with tensor parallelism, servers come in sets of all tp indices."""
    tp, peers = context.parallel.tp, context.host.peers
    assert peers is not None
    sets = (context.servers[start : start + tp] for start in range(0, len(context.servers), tp))
    kept = [rank for one in sets if set(one) <= set(members.ranks) for rank in one]
    used = {*range(context.parallel.num_workers), *context.servers, *(x.rank for x in peers.losses)}
    joined: dict[int, int] = {}
    for number, wish in members.candidates[: len(members.candidates) // tp * tp]:
        if wish is None or wish in used:
            wish = next(rank for rank in count(dist.get_world_size()) if rank not in used)
        joined[number] = wish
        used.add(wish)
    return Roster((*kept, *joined.values()), joined, state)


def _hold(groups: Sequence[dist.ProcessGroup], abandoned: Sequence[dist.Work]) -> None:
    """Keeps groups until their last work has ended, since the end of a group waits for that.

    It ends as soon as the other ranks have closed their connections.
    """
    while not all(work.is_completed() for work in abandoned):
        time.sleep(_LOOK_S)
