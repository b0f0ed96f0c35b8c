"""Point-to-point communication between pipeline stages: activations forward, gradients backward.

Each rank communicates with the rank at its position in the stage before and in the stage after. A
rank does not wait for what it sends before the step ends, so it can start the next tick while the
neighbouring stage is still busy.
"""

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from distca.runtime.mesh import RankContext

NEXT, PREVIOUS = +1, -1


class StageP2P:
    """Sends and receives the tensors of one step, one tensor for each half of a micro-batch."""

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._sent: list[tuple[dist.Work, Tensor]] = []  # keeps tensors alive until they are sent

    def send(self, tensors: Sequence[Tensor], side: int) -> None:
        """Starts to send tensors to the NEXT or the PREVIOUS stage."""
        for tensor in tensors:
            data = tensor.detach().contiguous()
            work = dist.isend(data, self._neighbour(side), group=self._context.pipeline_group)
            assert work is not None
            self._sent.append((work, data))

    def recv(self, tensors: list[Tensor], side: int) -> list[Tensor]:
        """Fills tensors with those that the stage on a side sends."""
        group = self._context.pipeline_group
        works = [dist.irecv(tensor, self._neighbour(side), group=group) for tensor in tensors]
        for work in works:
            assert work is not None
            work.wait()
        return tensors

    def wait(self) -> None:
        """Waits until everything is sent."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

    def _neighbour(self, side: int) -> int:
        assert self._context.stage is not None
        return self._context.rank_in_stage(self._context.stage + side)
