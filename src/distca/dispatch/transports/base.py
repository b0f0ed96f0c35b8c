"""What every transport provides: an uneven all-to-all of bytes, and a gather of Python objects.

An all-to-all is asynchronous: between its start and its wait, the caller computes what needs
nothing from peers.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

Wait = Callable[[], None]  # returns when the receive buffer is filled and the send buffer is free
Object = TypeVar("Object")


class ExchangeError(RuntimeError):
    """Raised when peers did not join a collective, or were lost inside it."""


class Transport(Protocol):
    @property
    def rank(self) -> int: ...

    @property
    def num_ranks(self) -> int: ...

    def start(
        self, send: Tensor, recv: Tensor, send_bytes: Sequence[int], recv_bytes: Sequence[int]
    ) -> Wait:
        """Starts an all-to-all: consecutive parts of ``send`` go to the ranks in order, and the
        parts that they send are laid one after another into ``recv``."""
        ...

    def all_gather_object(self, mine: Object) -> list[Object]:
        """Returns the objects of all ranks, gathered over the host; waits for all ranks."""
        ...

    def refusal(self, device: torch.device) -> str | None:
        """Returns why tensors of this device cannot be exchanged; None if they can."""
        ...
