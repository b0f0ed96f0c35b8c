"""How a process that was not started with a run becomes one of its dedicated servers.

    run = Run.at("10.0.0.5:29500")         # the store of the run
    joined = run.join(parallel, device)    # waits for the border of two steps

The first rank publishes in the store what the run is, and where its hub listens. A process reads
both, checks that it fits, and waits at the hub as a candidate. When ranks make their groups again
between two steps, they take candidates with them (``runtime.regroup``).
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

import torch
from torch.distributed.distributed_c10d import Store

from distca.dispatch.hub_address import HubAddress
from distca.dispatch.peer_news import Members
from distca.dispatch.peers import Peers
from distca.pipeline.mesh import MeshShape
from distca.runtime.lost_ranks import name_them_here, spare, watch
from distca.runtime.mesh import RankContext
from distca.runtime.new_groups import Groups, make_groups, root_store
from distca.runtime.waiting import open_to_signals

ANSWER_S = 60.0  # how long a run may take to publish a hub, such as while it regroups
_RUN, _HUB = "distca run", "distca hub"
_CONNECT_S = 10.0
_LOOK_S = 0.2


@dataclass(frozen=True)
class Description:
    """What a run is: its config, its ranks at the start, and the facts that must agree.

    faults: those of ``--inject``, as text, of which some may be for a server that joins.
    """

    config: dict[str, Any]
    num_ranks: int
    ranks_per_node: int | None
    facts: dict[str, Any]
    faults: list[str]


@dataclass(frozen=True, eq=False)
class Joined:
    """The place of a new server in a run, and what it has to know of it."""

    context: RankContext
    state: dict[str, Any]


def publish(context: RankContext, description: Description | None = None) -> None:
    """Tells where the run can be joined; the first rank calls it, again after each regrouping."""
    peers, store = context.host.peers, root_store(context.world_group.get_group_store())
    assert peers is not None
    assert peers.address is not None
    if description is not None:
        store.set(_RUN, json.dumps(asdict(description)))
    store.set(_HUB, json.dumps([peers.address, context.host.ranks]))


def publish_end(context: RankContext) -> None:
    with suppress(RuntimeError):  # the store may be gone
        root_store(context.world_group.get_group_store()).set(_HUB, "[]")


def _open(host: str, port: int) -> Store:
    """Connects to a store. Raises TimeoutError if what listens there is silent.

    torch would wait for it without end.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    def connect() -> Store:
        limit = timedelta(seconds=ANSWER_S)
        return TCPStore(host, port, timeout=limit, wait_for_workers=False)

    try:
        return open_to_signals(connect, _CONNECT_S)
    except TimeoutError:
        raise TimeoutError(f"it is silent for {_CONNECT_S:.0f} s") from None


class Run:
    """A run, as a process sees it that does not belong to it yet."""

    def __init__(self, store: Store, where: str) -> None:
        self._store, self._where = store, where
        self.description = Description(**json.loads(self._get(_RUN)))

    @classmethod
    def at(cls, address: str) -> Run:
        """Finds the run whose store has this address, HOST:PORT. Raises ValueError if none has."""
        host, colon, port = address.rpartition(":")
        if not colon or not host or not port.isdecimal() or int(port) >= 1 << 16:
            raise ValueError(f"--join {address}: give HOST:PORT, as the run shows it at its start")
        try:
            # Unlike the store, this fails at once if nobody listens.
            socket.create_connection((host, int(port)), _CONNECT_S).close()
            store = _open(host, int(port))
        except (RuntimeError, ValueError, OSError) as error:
            raise ValueError(
                f"--join {address}: no run answers there ({str(error).splitlines()[0]})"
            ) from None
        return cls(store, address)

    def join(
        self,
        parallel: MeshShape,
        device: torch.device,
        wish: int | None = None,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> Joined | None:
        """Waits for a place; returns None if the run ends before, or if a stop is requested.

        parallel: the mesh of the run at its start.
        wish: the global rank that it would like to have.
        """
        name_them_here()
        deadline, tried = time.monotonic() + ANSWER_S, ""
        while not is_stopped():
            hub = self._get(_HUB)
            if hub == "[]":
                return None
            if hub == tried:  # whose ranks regroup, or are lost
                if time.monotonic() > deadline:
                    raise ValueError(f"the run at {self._where} does not answer any more")
                time.sleep(_LOOK_S)
                continue
            address, ranks = json.loads(hub)
            with suppress(OSError):
                peers = Peers.as_candidate(ranks, HubAddress(*address), wish)
                try:
                    members = _wait(peers, is_stopped)
                    groups = members and self._make_groups(members, peers, parallel, device)
                    if groups and groups.rank is not None:
                        return _joined(groups, parallel, device)
                    if not groups and members:  # one was lost; the ranks may be there still
                        hub = ""
                finally:
                    peers.close()
            deadline, tried = time.monotonic() + ANSWER_S, hub
        return None

    def _make_groups(
        self, members: Members, peers: Peers, parallel: MeshShape, device: torch.device
    ) -> Groups | None:
        def rank_in(roster: Any) -> int | None:
            return roster.joined.get(peers.number)  # type: ignore[no-any-return]

        groups = make_groups(members, peers, self._store, parallel, device, rank_in)
        if groups is not None and groups.rank is None:  # with tp, one candidate too many
            while peers.lost is None and not peers.is_over:
                time.sleep(_LOOK_S)
        return groups

    def _get(self, key: str) -> str:
        """Returns a value of the store. Raises ValueError if it does not come."""
        try:
            value: bytes = self._store.get(key)
        except RuntimeError:
            raise ValueError(
                f"--join {self._where}: the run there has ended, or has no dedicated servers; a run"
                " can be joined from its first step on, if it was started with parallel.servers"
                " above 0"
            ) from None
        return value.decode()


def _wait(peers: Peers, is_stopped: Callable[[], bool]) -> Members | None:
    members = None
    while members is None and peers.lost is None and not peers.is_over and not is_stopped():
        members = peers.members(_LOOK_S)
    return members


def _joined(groups: Groups, parallel: MeshShape, device: torch.device) -> Joined:
    assert groups.rank is not None
    assert groups.attention is not None
    assert groups.world is not None
    context = RankContext(
        parallel=replace(parallel, servers=len(groups.roster.servers)),
        rank=groups.rank,
        device=device,
        mesh=None,
        attention_group=groups.attention,
        world_group=groups.world,
        servers=groups.roster.servers,
        host=groups.host,
        checkpoint_group=None,
        tied_group=None,
    )
    watch(groups.host.peers)  # type: ignore[arg-type]
    spare(groups.roster.servers)
    return Joined(context, groups.roster.state)
