"""What every transport provides: announcements, an uneven all-to-all of bytes, and a gather.

An all-to-all is asynchronous: between its start and its wait, the caller computes what needs
nothing from peers. Ranks announce it to each other first (``distca.dispatch.agreement``).
"""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

Wait = Callable[[], None]  # returns when the receive buffer is filled and the send buffer is free
Check = Callable[[], None]  # raises if the ranks do not agree
Records = Sequence[str | None]  # what each rank has announced; None if it has not
Object = TypeVar("Object")


class ExchangeError(RuntimeError):
    """Raised when peers did not join a collective, or were lost inside it.

    records: those of all ranks, for a failed announcement.
    """

    def __init__(self, message: str, records: Records = ()) -> None:
        super().__init__(message)
        self.records = records


class Transport(Protocol):
    @property
    def rank(self) -> int: ...

    @property
    def num_ranks(self) -> int: ...

    @property
    def number(self) -> int:
        """Which one of several transports over the same ranks this is, the same on all of them."""
        ...

    def announce(self, record: str) -> Callable[[], Records]:
        """Starts to tell all ranks a record over the host.

        The result waits for the records of all ranks and returns them, or one for all if they are
        equal.
        """
        ...

    def note(self, record: str, device: torch.device) -> bool:
        """Tells all ranks what this one sends next, if they may compare that while it is under way.

        If the records differ, a start or a wait soon after raises. Returns False if tensors of this
        device are sent only after the comparison, so that the record must be announced.
        """
        ...

    def start(
        self,
        send: Tensor,
        recv: Tensor,
        send_bytes: Sequence[int],
        recv_bytes: Sequence[int],
        check: Check | None = None,
    ) -> Wait:
        """Starts an all-to-all: consecutive parts of ``send`` go to the ranks in order, and the
        parts that they send are laid one after another into ``recv``.

        check: waits for the announcements of all ranks. If it raises, so does the wait.
        """
        ...

    def all_gather_object(self, mine: Object) -> list[Object]:
        """Returns the objects of all ranks, gathered over the host; waits for all ranks."""
        ...

    def refusal(self, device: torch.device) -> str | None:
        """Returns why tensors of this device cannot be exchanged; None if they can."""
        ...
