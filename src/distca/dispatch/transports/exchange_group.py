"""Process groups whose exchanges go before the kernels that they run beside."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def new_exchange_group(ranks: Sequence[int]) -> dist.ProcessGroup:
    """Creates a group for exchanges of layers; a collective of the whole world."""
    assert dist.group.WORLD is not None
    timeout = timeout_of(dist.group.WORLD)
    group: dist.ProcessGroup = dist.new_group(ranks, timeout, pg_options=exchange_options(timeout))
    return group


def exchange_options(timeout: timedelta) -> Any:
    """Returns options for NCCL streams of high priority; None where there is no NCCL.

    A kernel of NCCL needs few thread blocks, but with normal priority they start only after all
    those of kernels that were launched before. One call of attention occupies the device for up to
    a second, in which every rank would wait for its data.
    """
    if not dist.is_nccl_available():
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout  # as that of the group, or torch warns
    return options


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    device = "cpu" if "cpu:" in dist.get_backend_config(group) else "cuda"
    timeout: timedelta = group._get_backend(torch.device(device)).options._timeout
    return timeout
