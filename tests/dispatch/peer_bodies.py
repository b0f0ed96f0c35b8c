"""What ranks do that announce, leave, fail or are killed; each returns what it has seen."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from queue import SimpleQueue

import torch.distributed as dist

from distca.dispatch.announcements import Announcement
from distca.dispatch.peers import Peers

Seen = list[object]
PEERS: list[Peers] = []


def start(
    body: Callable[..., Seen], pipe: Connection, rank: int, size: int, store: str, *args: object
) -> None:
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    assert dist.group.WORLD is not None
    peers = Peers.of(dist.group.WORLD)
    PEERS[:] = [peers]
    pipe.send(body(peers, rank, *args))
    peers.close()


def outcome(announcement: Announcement, timeout_s: float = 30.0) -> list[object]:
    try:
        return list(PEERS[0].wait(announcement, timeout_s))
    except Exception as error:
        return [type(error).__name__, str(error), *(getattr(error, "records", None) or [])]


def announces(peers: Peers, rank: int) -> Seen:
    announcements = [peers.announce("a"), peers.announce(f"b{rank}"), peers.announce("c")]
    return [outcome(one) for one in announcements]


def notes(peers: Peers, rank: int) -> Seen:
    """Notes records between announced ones; one of the second batch differs."""
    seen: Seen = []
    for different in ("", str(rank)):
        peers.note("a")
        here = peers.announce("here")
        peers.note(f"b{different}")
        peers.note("c")
        seen.append(outcome(here))  # also sends what was noted
        seen += [outcome(noted) for noted in peers.take_noted()]
    return seen


def notes_too_few(peers: Peers, rank: int) -> Seen:
    """The first rank notes one record more than the others."""
    for record in ("a", "b", "c")[: 3 if rank == 0 else 2]:
        peers.note(record)
    (noted,) = peers.take_noted()
    seen = outcome(noted, 0.5)
    time.sleep(1.0)  # the first rank waits for longer than the others
    return seen


def notes_after_a_loss(peers: Peers, rank: int) -> Seen:
    outcome(peers.announce("before"))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    assert peers.lost_within(10) is not None
    peers.note("after")
    return [outcome(noted) for noted in peers.take_noted()]


def is_killed(peers: Peers, rank: int, victim: int, with_child: bool) -> Seen:
    outcome(peers.announce("before"))
    if rank == victim:
        time.sleep(0.3)
        if with_child and os.fork() == 0:
            time.sleep(4)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    called: SimpleQueue[str] = SimpleQueue()
    peers.on_loss(lambda error: called.put(str(error)))
    begin = time.monotonic()
    seen: Seen = [outcome(peers.announce("after"))]
    seen += [outcome(peers.announce("again")), called.get(timeout=2.5)]
    return [*seen, time.monotonic() - begin < 2.5]


def fails(peers: Peers, rank: int, victim: int) -> Seen:
    outcome(peers.announce("before"))
    if rank == victim:
        peers.fail("OutOfMemoryError: no memory")
        return []
    return [str(peers.lost_within(5))]


def leaves(peers: Peers, rank: int, first: int) -> Seen:
    last = peers.announce("last")
    peers.flush()
    if rank == first:
        return outcome(last)
    time.sleep(0.5)  # the first one has left before this one looks
    seen = [outcome(last), peers.lost_within(0.2)]
    return [*seen, outcome(peers.announce("one more"))] if first else seen


def is_late(peers: Peers, rank: int) -> Seen:
    outcome(peers.announce("first"))
    if rank == 1:
        time.sleep(1)
        return []
    return outcome(peers.announce("second"), 0.3)  # by then both have announced it


def asks_who_is_left(peers: Peers, rank: int, victims: list[int]) -> Seen:
    outcome(peers.announce("before"))
    if rank in victims:
        time.sleep(0.1 * rank)
        os.kill(os.getpid(), signal.SIGKILL)
    left = peers.regroup().ranks
    assert peers.lost_within(5) is not None
    return [left, sorted(lost.rank for lost in peers.losses)]
