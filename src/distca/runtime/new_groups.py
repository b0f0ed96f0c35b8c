"""The groups that contain dedicated servers, made while a run goes on.

Servers come and go, so these groups are not made of the ranks that have started together
(``torch.distributed.new_group``), but of any processes that share a store.

A rank that is lost meanwhile would leave the others waiting in a connection that never comes, with
no way out. So groups are made in a thread, which is abandoned then. Nobody uses the groups before
all have them: every rank announces that, and the hub of the new groups answers all or none
(``distca.dispatch.hub``). A rank that gives up does so before it announces, and never after.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import GroupName, PrefixStore, Store

from distca.dispatch.peer_news import Members
from distca.dispatch.peers import Peers
from distca.dispatch.transports.abort import abort_communicators
from distca.dispatch.transports.base import ExchangeError
from distca.dispatch.transports.exchange_group import exchange_options
from distca.pipeline.mesh import MeshShape
from distca.runtime.host_ranks import HostRanks

CONNECT_S = 60.0  # for all members to connect; those that are lost are noticed earlier
_LOOK_S = 0.02


@dataclass(frozen=True)
class Roster:
    """Who belongs to new groups, as the first rank has decided.

    servers: the global ranks of all dedicated servers.
    joined: those of new servers, by the number of the candidate.
    state: what a new server needs to know of the run.
    """

    servers: tuple[int, ...]
    joined: dict[int, int] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)

    def write(self, store: Store) -> None:
        store.set("roster", json.dumps(asdict(self)))

    @classmethod
    def read(cls, store: Store) -> Roster:
        """Waits for the roster, and returns it."""
        values = json.loads(store.get("roster"))
        joined = {int(number): rank for number, rank in values["joined"].items()}
        return cls(tuple(values["servers"]), joined, values["state"])


@dataclass(frozen=True, eq=False)
class Groups:
    """New groups as one rank has them, as in ``RankContext``. A rank without a part has none."""

    roster: Roster
    rank: int | None
    attention: dist.ProcessGroup | None = None
    world: dist.ProcessGroup | None = None

    @property
    def host(self) -> HostRanks:
        assert self.world is not None
        return HostRanks(self.world, Peers.of(self.world, alone=True))

    def close(self) -> None:
        if self.world is not None and self.attention is not None:
            self.host.peers.close()  # type: ignore[union-attr]
            abort_communicators([self.attention])
            for group in (self.attention, self.world):
                dist.destroy_process_group(group)


def root_store(store: Store) -> Store:
    """Returns the store that all processes of a run can reach, below all prefixes."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def store_of(root: Store, name: str) -> Store:
    """Returns the part of the store for groups of this name, with a connection of its own.

    A connection on which a thread waits serves nobody else.
    """
    return PrefixStore(f"distca {name}", root.clone())  # type: ignore[attr-defined]


def make_groups(
    members: Members,
    before: Peers,
    root: Store,
    parallel: MeshShape,
    device: torch.device,
    rank_in: Callable[[Roster], int | None],
) -> Groups | None:
    """Makes the groups of all members; returns None on all of them if one is lost meanwhile.

    before: the ranks as they were, whose hub notices also the loss of one that never came.
    rank_in: the global rank of this process; None if it has no part in the groups.
    """

    made: list[dist.ProcessGroup] = []

    def build() -> Groups:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        store = store_of(root, members.name)
        roster = Roster.read(store)
        rank = rank_in(roster)
        if rank is None:
            return Groups(roster, None)
        return _build(roster, rank, parallel, device, store, members.name, made)

    attempt, deadline = _in_thread(build), time.monotonic() + CONNECT_S
    while True:
        if _is_cancelled(members, before) or time.monotonic() > deadline:
            break
        with suppress(TimeoutError):
            try:
                groups = attempt.result(_LOOK_S)
            except RuntimeError:  # a connection has failed
                break
            return (
                groups if groups.rank is None or _all_have_come(groups, members, before) else None
            )
    before.cancel(members.name)
    abort_communicators(made)
    attempt.add_done_callback(_close)
    return None


def _build(
    roster: Roster,
    rank: int,
    parallel: MeshShape,
    device: torch.device,
    store: Store,
    name: str,
    made: list[dist.ProcessGroup],
) -> Groups:
    """Makes the groups of a rank. ``made`` gets the one that may have to be aborted meanwhile."""
    workers, tp = range(parallel.num_workers), parallel.tp
    everyone = [*workers, *roster.servers]
    index = everyone.index(rank) % tp  # the number of workers is a multiple of tp
    members = [*workers[index::tp], *roster.servers[index::tp]]
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    attention = _group(members, rank, backend, store, f"{name} attention {index}")
    made.append(attention)
    if device.type == "cuda":  # NCCL connects in the first collective
        dist.all_reduce(torch.ones((), device=device), group=attention)
        torch.cuda.synchronize(device)
    world = _group(everyone, rank, "gloo", store, f"{name} world")
    groups = Groups(roster, rank, attention, world)
    assert groups.host.peers is not None  # it connects to the hub
    return groups


def _group(
    ranks: Sequence[int], rank: int, backend: str, store: Store, name: str
) -> dist.ProcessGroup:
    """Returns a group of global ranks, which need not be ranks of the default group."""
    group, _ = c10d._new_process_group_helper(
        len(ranks),
        ranks.index(rank),
        [],
        backend,
        store,
        GroupName(name),
        backend_options=exchange_options(c10d.default_pg_timeout),
        timeout=c10d.default_pg_timeout,
    )
    c10d._world.pg_group_ranks[group] = {number: place for place, number in enumerate(ranks)}
    return group  # type: ignore[no-any-return]


def _all_have_come(groups: Groups, members: Members, before: Peers) -> bool:
    """Waits until all ranks have the groups; returns false on all if one is lost before."""
    peers = groups.host.peers
    assert peers is not None
    answer = peers.announce("here")
    peers.flush()
    while True:
        try:
            answer.result(_LOOK_S)
            return True
        except TimeoutError:
            for rank in _absent(groups.roster, members, before):
                peers.tell_lost(rank)
        except ExchangeError:
            groups.close()
            return False


def _is_cancelled(members: Members, before: Peers) -> bool:
    """Returns whether a member is lost, or has given up."""
    lost = any(lost.rank in members.ranks for lost in before.losses)
    return lost or before.is_over or any(name == members.name for name, _ in before.cancelled)


def _absent(roster: Roster, members: Members, before: Peers) -> Collection[int]:
    """Returns the global ranks that will not come."""
    gone = {who for name, who in before.cancelled if name == members.name}
    candidates = {rank for number, rank in roster.joined.items() if -number in gone}
    return {lost.rank for lost in before.losses} | {who for who in gone if who >= 0} | candidates


def _in_thread(work: Callable[[], Groups]) -> Future[Groups]:
    future: Future[Groups] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, name="distca groups", daemon=True).start()
    return future


def _close(attempt: Future[Groups]) -> None:
    """Closes groups that were made although nobody waited for them any more."""
    if attempt.exception() is None:
        attempt.result().close()
