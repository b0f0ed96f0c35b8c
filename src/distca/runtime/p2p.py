"""What passes between pipeline stages: tokens on their way on, gradients on their way back.

Each rank talks to the same place in the stage before and after. Nobody waits for what it sends
until the step ends, so a stage goes on with the next tick while the neighbour is still busy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from distca.runtime.mesh import RankContext


class StageP2P:
    """One step's letters to and from both sides; one for each half."""

    def __init__(self, context: RankContext, dtype: torch.dtype) -> None:
        self._context, self._dtype = context, dtype
        self._sent: list[tuple[dist.Work, Tensor]] = []  # tensors live until they are gone

    def send_on(self, halves: Sequence[Tensor]) -> None:
        self._send(halves, +1)

    def take_on(self, sizes: Sequence[int], hidden: int) -> list[Tensor]:
        """[size, hidden] for each half."""
        device = self._context.device
        like = [torch.empty(size, hidden, dtype=self._dtype, device=device) for size in sizes]
        return self._take(like, -1)

    def send_back(self, gradients: Sequence[Tensor]) -> None:
        self._send(gradients, -1)

    def take_back(self, sent: Sequence[Tensor]) -> list[Tensor]:
        """Gradients of what was sent on."""
        return self._take([torch.empty_like(half) for half in sent], +1)

    def finish(self) -> None:
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

    def _send(self, tensors: Sequence[Tensor], side: int) -> None:
        for tensor in tensors:
            letter = tensor.detach().contiguous()
            work = dist.isend(letter, self._rank(side), group=self._context.pipeline)
            assert work is not None
            self._sent.append((work, letter))

    def _take(self, tensors: list[Tensor], side: int) -> list[Tensor]:
        works = [dist.irecv(x, self._rank(side), group=self._context.pipeline) for x in tensors]
        for work in works:
            assert work is not None
            work.wait()
        return tensors

    def _rank(self, side: int) -> int:
        assert self._context.stage is not None
        return self._context.of_stage(self._context.stage + side)
