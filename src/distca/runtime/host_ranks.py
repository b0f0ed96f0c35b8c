"""What all ranks of a run tell each other over the host between their steps.

In a run that survives the loss of dedicated servers, an answer has to be the same on all ranks even
if one of them is lost in this moment: either all get it, or all raise PeerLostError. Collectives do
not promise that, announcements do (``distca.dispatch.hub``, [Note: all or none]). So every answer
is announced before it is used.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from distca.dispatch.peer_news import PeerLostError
from distca.dispatch.peers import Peers
from distca.dispatch.transports.base import Records
from distca.dispatch.transports.surviving import NEWS_S, wait_unless_lost


@dataclass(frozen=True, eq=False)
class HostRanks:
    """The ranks of a run.

    group: all of them over gloo.
    peers: the same ranks; None in a run that ends when a rank is lost.
    """

    group: dist.ProcessGroup
    peers: Peers | None = None

    @property
    def ranks(self) -> list[int]:
        """The global ranks."""
        return dist.get_process_group_ranks(self.group)

    def any(self, mine: bool) -> bool:
        """Returns whether it is true on any rank."""
        if self.peers is not None:
            return "any: True" in _announce(self.peers, f"any: {mine}")
        flag = torch.tensor(int(mine))
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self.group)
        return bool(flag)

    def gather(self, mine: Tensor) -> Tensor:
        """[ranks, ...] Returns the tensors of all ranks, which have the same shape."""
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(self.group))]
        work = dist.all_gather(everyone, mine, group=self.group, async_op=True)
        assert work is not None
        if self.peers is None:
            work.wait()
        else:
            _finish(work, self.peers)
            _announce(self.peers, "gathered")
        return torch.stack(everyone)


def _finish(work: dist.Work, peers: Peers) -> None:
    try:
        wait_unless_lost(work, peers)
    except PeerLostError:
        raise
    except RuntimeError as error:
        raise peers.lost_within(NEWS_S) or error from error


def _announce(peers: Peers, record: str) -> Records:
    answer = peers.announce(record)
    peers.flush()
    return answer.result()
