"""What any transport promises: an uneven all-to-all of bytes, and notes over the host.

A transport starts an uneven all-to-all and hands back a promise; between the two, the caller
computes what needs nothing from peers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

Wait = Callable[[], None]  # until the receive buffer is filled and the send buffer is free
NOTE_BYTES = 1024


class ExchangeError(RuntimeError):
    """Peers did not come, or are gone."""


class Transport(Protocol):
    @property
    def rank(self) -> int: ...

    @property
    def num_ranks(self) -> int: ...

    def start(
        self, send: Tensor, recv: Tensor, send_bytes: Sequence[int], recv_bytes: Sequence[int]
    ) -> Wait:
        """Sends consecutive parts of a byte buffer to the ranks, and receives one from each."""
        ...

    def gather(self, note: bytes) -> list[bytes]:
        """Every rank's note, of at most NOTE_BYTES, over the host; waits for all."""
        ...

    def refusal(self, device: torch.device) -> str | None:
        """Why tensors of this device cannot be exchanged; None where they can."""
        ...
