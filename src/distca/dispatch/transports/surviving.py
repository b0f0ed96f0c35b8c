"""A transport whose ranks may lose some of their peers, and run their step to its end.

The collectives of a step outside of attention, such as those of FSDP, are in an order that all
their ranks follow to the end. A rank that stopped in the middle of a step would leave the others
waiting in one of them. So after the loss of a spare rank (a dedicated server, which takes part in
attention only) exchanges complete at once without moving anything, whatever their buffers hold, and
every rank soon reaches the end of the step. Nobody may use its results; ranks learn that from each
other when they announce its end (``distca.dispatch.hub``, [Note: all or none]).
"""

from collections.abc import Collection, Sequence
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from distca.dispatch.peer_news import PeerLostError
from distca.dispatch.peers import Peers
from distca.dispatch.transports.abort import abort_communicators
from distca.dispatch.transports.base import Check, Wait
from distca.dispatch.transports.distributed import DistributedTransport

# How long the news of a lost rank may take after a collective has failed. A rank that stopped
# without them would hold up the others, so it waits longer than the news of a lost node take.
NEWS_S = 15.0
_LOOK = timedelta(milliseconds=20)  # how often a rank that waits for data looks for lost ranks


class SurvivingTransport(DistributedTransport):
    """The ranks of a group, of which ``spares`` (global ranks) may be lost.

    peers: all ranks of the run, over which messages are announced. One channel for several groups
        lets all of them learn of a loss in the same place of their step.
    """

    _news_s = NEWS_S

    def __init__(
        self,
        group: dist.ProcessGroup,
        peers: Peers,
        spares: Collection[int],
        timeout: timedelta | None = None,
    ) -> None:
        self._spares = frozenset(spares)
        super().__init__(group, timeout, peers)

    def start(
        self,
        send: Tensor,
        recv: Tensor,
        send_bytes: Sequence[int],
        recv_bytes: Sequence[int],
        check: Check | None = None,
    ) -> Wait:
        if self._has_lost_spares:
            return _nothing
        wait = super().start(send, recv, send_bytes, recv_bytes, check)

        def survive() -> None:
            try:
                wait()
            except PeerLostError:
                if not self._has_lost_spares:
                    raise

        return survive

    @property
    def _has_lost_spares(self) -> bool:
        """Whether ranks are lost, and only such that the others can do without."""
        losses = self.peers.losses
        return bool(losses) and all(lost.rank in self._spares for lost in losses)

    def _finish(self, work: dist.Work, *, on_host: bool) -> None:
        if on_host:
            wait_unless_lost(work, self.peers)
        else:
            work.wait()  # on the device; a communicator that is aborted waits no longer

    def _free_device(self, lost: PeerLostError) -> None:
        """Ends the attention's own communicator; those of FSDP and pipelines go on."""
        assert self.group is not None
        abort_communicators([self.group] if lost.rank in self._spares else None)


def wait_unless_lost(work: dist.Work, peers: Peers) -> None:
    """Waits for a collective of the host, or raises PeerLostError as soon as a rank is lost.

    Gloo cannot abort: work that waits for a rank which has given up ends when that one closes its
    connections. It is kept in ``peers.abandoned`` until then.
    """
    while True:
        with suppress(RuntimeError):  # it takes longer, or has failed
            work.wait(_LOOK)
        if work.is_completed():
            work.wait()  # raises if it has failed
            return
        if peers.lost is not None:
            peers.abandoned.append(work)
            raise peers.lost


def _nothing() -> None:
    """Waits for nothing."""
