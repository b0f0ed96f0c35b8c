"""Memory of an exchange: one send and one receive buffer, used by one exchange at a time.

They hold only what is sent and received inside an exchange; whatever is returned to the caller or
saved for backward is copied out first. So one pair of buffers serves every layer and plan, and
memory stays flat. Two exchanges that overlap (ping and pong) need a pair each.
"""

from weakref import ReferenceType, ref

import torch
from torch import Tensor

_GROWTH = 1.25  # a little more than needed, so that plans of one size soon all fit


class Buffers:
    """A send and a receive buffer.

    capacity: bytes of each, allocated at first use; None grows them to the largest message.
    """

    def __init__(self, capacity: int | None = None) -> None:
        if capacity is not None and capacity < 0:
            raise ValueError(
                f"buffers of {capacity} bytes: give 0 or more, or None to let them grow"
            )
        self.capacity = capacity
        self._memory: dict[tuple[str, torch.device], Tensor] = {}
        self._user: ReferenceType[object] | None = None

    @property
    def nbytes(self) -> int:
        return sum(memory.numel() for memory in self._memory.values())

    def check(self, purpose: str, num_bytes: int) -> None:
        """Raises for a message that will never fit; called before anything is exchanged."""
        if self.capacity is not None and num_bytes > self.capacity:
            raise ValueError(
                f"the plan needs {num_bytes:,} bytes to {purpose} in one exchange but the buffers"
                f" have {self.capacity:,}: raise buffer_bytes, or plan with a smaller memory_bytes"
                " or a larger tolerance"
            )

    def acquire(self, user: object) -> None:
        """Reserves the buffers until ``release``, or until the user is deleted after an error."""
        if self._user is not None and self._user() is not None:
            raise RuntimeError(
                "an exchange was dispatched while another one used the same buffers: combine the"
                " first one before, or use a second CoreAttention for exchanges that overlap"
            )
        self._user = ref(user)

    def release(self) -> None:
        self._user = None

    def send(self, num_bytes: int, device: torch.device) -> Tensor:
        return self._allocate("send", num_bytes, device)

    def recv(self, num_bytes: int, device: torch.device) -> Tensor:
        return self._allocate("receive", num_bytes, device)

    def _allocate(self, purpose: str, num_bytes: int, device: torch.device) -> Tensor:
        memory = self._memory.get((purpose, device))
        if memory is None or memory.numel() < num_bytes:
            self.check(purpose, num_bytes)
            size = int(num_bytes * _GROWTH) if self.capacity is None else self.capacity
            self._memory.pop((purpose, device), None)  # freed before the larger one is allocated
            memory = torch.empty(size, dtype=torch.uint8, device=device)
            self._memory[purpose, device] = memory
        return memory[:num_bytes]
