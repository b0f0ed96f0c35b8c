"""How often, and how much, ranks exchange."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor

from distca.dispatch.transports.distributed import DistributedTransport


@contextmanager
def counted() -> Iterator[list[int]]:
    """Bytes sent by each exchange."""
    sent: list[int] = []
    start = DistributedTransport.start

    def counting(self: Any, send: Tensor, recv: Tensor, *splits: Any) -> Any:
        sent.append(send.numel())
        return start(self, send, recv, *splits)

    with patch.object(DistributedTransport, "start", counting):
        yield sent
