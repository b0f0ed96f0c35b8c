"""The way out of collectives that will never complete."""

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist


def abort_communicators(groups: Iterable[dist.ProcessGroup] | None = None) -> None:
    """Aborts NCCL communicators of this process, which frees its device and its host threads.

    A kernel that waits for a lost rank otherwise occupies the device until the timeout of its
    group. The groups cannot communicate afterwards.

    groups: None for all groups of the process.
    """
    if not dist.is_nccl_available():
        return
    backends: list[Any] = []
    for group in list(dist.distributed_c10d._world.pg_map) if groups is None else groups:
        with suppress(RuntimeError):  # a group without a backend for CUDA tensors
            backend = group._get_backend(torch.device("cuda"))
            if isinstance(backend, dist.ProcessGroupNCCL):
                backends.append(backend)
    if backends:  # as one group call, since single ones can wait for each other
        backends[0]._group_start()
        for backend in backends:
            backend.abort()
        backends[0]._group_end()
