"""Point-to-point communication between pipeline stages: activations forward, gradients backward.

Each rank communicates with the rank at its position in the stage before and in the stage after.

[Note: matched transfers] What a tick produces is passed on at its end. All stages start the sends
and the receives of a tick together, so nothing is ever under way that the other side has not asked
for. An NCCL send occupies the device until it is received. If it waited for a later tick, a rank
whose host waits for its device (to load a kernel, or to allocate) would never reach that tick's
attention, in which the receiver waits for it: a deadlock.
"""

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from distca.runtime.mesh import RankContext


class StageTransfer:
    """The tensors that one rank sends and receives at the end of a tick."""

    def __init__(
        self,
        context: RankContext,
        outgoing: Sequence[Tensor],
        incoming: Sequence[Tensor],
        *,
        source: int,
        target: int,
    ) -> None:
        """Starts to pass on tensors.

        outgoing, incoming: one tensor for each half, or none; not both none. Incoming ones are
            filled by the stage on the other side.
        source, target: the stages that incoming tensors are from, and that outgoing ones go to.
        """
        group = context.pipeline_group
        self._outgoing = [tensor.detach().contiguous() for tensor in outgoing]  # alive until sent
        self._incoming = list(incoming)
        operations = [
            dist.P2POp(dist.isend, tensor, context.rank_in_stage(target), group)
            for tensor in self._outgoing
        ]
        operations += [
            dist.P2POp(dist.irecv, tensor, context.rank_in_stage(source), group)
            for tensor in self._incoming
        ]
        self._works = dist.batch_isend_irecv(operations)

    def wait(self) -> list[Tensor]:
        """Waits until everything is sent and received; returns what was received."""
        while self._works:
            self._works.pop().wait()
        self._outgoing.clear()
        return self._incoming
