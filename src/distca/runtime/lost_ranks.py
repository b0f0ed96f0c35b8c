"""How a rank ends soon after another one is lost, with a sentence that names it.

Collectives raise late or never when a rank is lost: those of NCCL wait until their timeout, and the
main thread waits with them. So another thread ends the process if the main thread does not.

A run can do without its dedicated servers (``distca.runtime.regroup``), so their loss ends no rank.
"""

import logging
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from threading import Event, Timer
from typing import NoReturn

import torch.distributed as dist

from distca.dispatch.peer_news import PeerLostError
from distca.dispatch.peers import Peers
from distca.runtime.launched import RankEndedError, report, sentence

GRACE_S = 2.0  # for the main thread to raise by itself
_NEWS_S = 1.0  # how long the news may take after a collective has failed

_over = Event()  # the run of this rank, with success or without
_world: list[Peers] = []
_spares: set[int] = set()


def watch_ranks() -> None:
    """Watches all ranks of the world; every one of them calls it after it has joined."""
    assert dist.group.WORLD is not None
    watch(Peers.of(dist.group.WORLD))
    name_them_here()


def watch(peers: Peers) -> None:
    """Watches these ranks from now on, instead of those before."""
    _world[:] = [peers]
    peers.on_loss(_end_soon)


def name_them_here() -> None:
    """Leaves it to this module to tell who is lost."""
    logging.getLogger("distca.dispatch").setLevel(logging.CRITICAL)


def spare(ranks: Collection[int]) -> None:
    """Lets this rank go on if these are lost, from now on."""
    _spares.clear()
    _spares.update(ranks)


@contextmanager
def naming_lost_ranks() -> Iterator[None]:
    """Ends this rank after an error that the loss of another one has caused.

    Tells the other ranks about any other error of this rank.
    """
    try:
        yield
    except Exception as error:
        _over.set()
        for peers in _world:
            if isinstance(error, RuntimeError):
                lost = peers.lost_within(_NEWS_S, besides=_spares) or peers.lost
                if lost is not None:
                    _end(lost)
            peers.fail(sentence(error))
        raise
    finally:
        _over.set()


def _end_soon(lost: PeerLostError) -> None:
    if lost.rank in _spares:
        return

    def end() -> None:
        if not _over.is_set():
            _end(lost)

    timer = Timer(GRACE_S, end)
    timer.daemon = True
    timer.start()


def _end(lost: PeerLostError) -> NoReturn:
    """Ends the process without the cleaning up of torch, which could wait for the lost rank."""
    error = RankEndedError(
        f"{lost}, so this rank ends too; start the run again to resume from its last checkpoint"
    )
    os.write(2, f"distca: {error}\n".encode())  # not by a stream, which may be locked
    report(error)
    os._exit(1)
