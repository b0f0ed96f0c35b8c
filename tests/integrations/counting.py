"""Records what ranks do: their exchanges, and the devices of their plans."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor

from distca.dispatch.transports.distributed import DistributedTransport
from distca.integrations.shared import planned_batch


@contextmanager
def counted() -> Iterator[list[int]]:
    """Records the bytes that each exchange sends."""
    sent: list[int] = []
    start = DistributedTransport.start

    def counting(self: Any, send: Tensor, recv: Tensor, *splits: Any) -> Any:
        sent.append(send.numel())
        return start(self, send, recv, *splits)

    with patch.object(DistributedTransport, "start", counting):
        yield sent


@contextmanager
def recorded_devices(local_world_size: int) -> Iterator[list[dict[str, list[Any]]]]:
    """Records nodes, speeds and memory limits of plans, given a local world size."""
    found: list[dict[str, list[Any]]] = []
    plan = planned_batch.plan

    def recording(*args: Any, **kwargs: Any) -> Any:
        made = plan(*args, **kwargs)
        names = ("node", "speed", "memory_bytes")
        found.append({name: getattr(made.devices, name).tolist() for name in names})
        return made

    environment = {"LOCAL_WORLD_SIZE": str(local_world_size)}
    with patch.object(planned_batch, "plan", recording), patch.dict("os.environ", environment):
        yield found
