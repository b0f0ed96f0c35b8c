"""Point-to-point communication between pipeline stages: activations forward, gradients backward.

Each rank communicates with the rank at its position in the stage before and in the stage after. A
rank does not wait for what it sends before the step ends, so it can start the next tick while the
neighbouring stage is still busy.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from distca.runtime.mesh import RankContext

NEXT, PREVIOUS = +1, -1


class StageP2P:
    """Sends and receives the tensors of one step, one tensor for each half of a micro-batch."""

    def __init__(self, context: RankContext, dtype: torch.dtype) -> None:
        self._context, self._dtype = context, dtype
        self._sent: list[tuple[dist.Work, Tensor]] = []  # keeps tensors alive until they are sent

    def send_activations(self, halves: Sequence[Tensor]) -> None:
        """Sends activations to the next stage."""
        self._send(halves, NEXT)

    def recv_activations(self, sizes: Sequence[int], hidden: int) -> list[Tensor]:
        """Receives activations [size, hidden] of each half from the previous stage."""
        device = self._context.device
        return self._recv(
            [torch.empty(size, hidden, dtype=self._dtype, device=device) for size in sizes],
            PREVIOUS,
        )

    def send_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Sends gradients of received activations to the previous stage."""
        self._send(gradients, PREVIOUS)

    def recv_gradients(self, sent: Sequence[Tensor]) -> list[Tensor]:
        """Receives the gradients of activations that were sent to the next stage."""
        return self._recv([torch.empty_like(half) for half in sent], NEXT)

    def wait(self) -> None:
        """Waits until everything is sent."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

    def _send(self, tensors: Sequence[Tensor], side: int) -> None:
        for tensor in tensors:
            data = tensor.detach().contiguous()
            work = dist.isend(data, self._neighbour(side), group=self._context.pipeline_group)
            assert work is not None
            self._sent.append((work, data))

    def _recv(self, tensors: list[Tensor], side: int) -> list[Tensor]:
        group = self._context.pipeline_group
        works = [dist.irecv(tensor, self._neighbour(side), group=group) for tensor in tensors]
        for work in works:
            assert work is not None
            work.wait()
        return tensors

    def _neighbour(self, side: int) -> int:
        assert self._context.stage is not None
        return self._context.rank_in_stage(self._context.stage + side)
