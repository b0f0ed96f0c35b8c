"""Records what ranks do: their exchanges, and the devices of their plans."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor

from distca.dispatch.transports.distributed import DistributedTransport
from distca.integrations.shared import groups, planned_batch


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
def recorded_devices(ranks_per_node: int) -> Iterator[list[dict[str, list[Any]]]]:
    """Records nodes, speeds and memory limits of plans, given how many ranks are on a node."""
    found: list[dict[str, list[Any]]] = []
    plan = planned_batch.plan

    def recording(*args: Any, **kwargs: Any) -> Any:
        made = plan(*args, **kwargs)
        names = ("node", "speed", "memory_bytes")
        found.append({name: getattr(made.devices, name).tolist() for name in names})
        return made

    def node_name() -> str:
        return f"node {dist.get_rank() // ranks_per_node}"

    named = patch.object(groups, "node_name", node_name)
    with patch.object(planned_batch, "plan", recording), named:
        yield found
