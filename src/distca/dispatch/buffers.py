"""Memory for what is under way: one set of buffers, used by one exchange at a time.

They hold only what is sent and received inside an exchange; whatever is handed out or saved for
backward is copied out first. So one send and one receive buffer serve every layer and plan, and
memory stays flat. Two exchanges that overlap (ping and pong) need a set each.
"""

from __future__ import annotations

from weakref import ReferenceType, ref

import torch
from torch import Tensor

_GROWTH = 1.25  # a little more than needed, so that plans of one size soon all fit


class Buffers:
    """``capacity`` bytes each way, claimed at first use; None grows to the largest message."""

    def __init__(self, capacity: int | None = None) -> None:
        if capacity is not None and capacity < 0:
            raise ValueError(
                f"buffers of {capacity} bytes: give 0 or more, or None to let them grow"
            )
        self.capacity = capacity
        self._memory: dict[tuple[str, torch.device], Tensor] = {}
        self._holder: ReferenceType[object] | None = None

    @property
    def nbytes(self) -> int:
        return sum(memory.numel() for memory in self._memory.values())

    def check(self, way: str, size: int) -> None:
        """Refuses what will never fit; to be asked before anything is under way."""
        if self.capacity is not None and size > self.capacity:
            raise ValueError(
                f"the plan needs {size:,} bytes to {way} in one exchange but the buffers have"
                f" {self.capacity:,}: raise buffer_bytes, or plan with a smaller memory_bytes"
                " or a larger tolerance"
            )

    def hold(self, holder: object) -> None:
        """Until it lets go, or is gone (after an error), no other exchange may use them."""
        if self._holder is not None and self._holder() is not None:
            raise RuntimeError(
                "an exchange was launched while another was under way in the same buffers:"
                " wait for the first, or use a second CoreAttention for what overlaps"
            )
        self._holder = ref(holder)

    def let_go(self) -> None:
        self._holder = None

    def send(self, size: int, device: torch.device) -> Tensor:
        return self._claim("send", size, device)

    def recv(self, size: int, device: torch.device) -> Tensor:
        return self._claim("receive", size, device)

    def _claim(self, way: str, size: int, device: torch.device) -> Tensor:
        memory = self._memory.get((way, device))
        if memory is None or memory.numel() < size:
            self.check(way, size)
            wanted = int(size * _GROWTH) if self.capacity is None else self.capacity
            self._memory.pop((way, device), None)  # freed before the larger one is taken
            memory = torch.empty(wanted, dtype=torch.uint8, device=device)
            self._memory[way, device] = memory
        return memory[:size]
