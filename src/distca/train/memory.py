"""Checks before a run whether it fits into memory."""

import os

import torch

from distca.pipeline.memory import GIB, Memory


def available(device: torch.device, local_ranks: int, limit_gib: float = 0.0) -> int:
    """Returns the bytes that a rank may use: the given limit, or its share of the device."""
    if limit_gib:
        return int(limit_gib * GIB)
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory * 0.95)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // local_ranks


def check(memory: Memory, limit: int) -> None:
    """Raises ValueError with the estimate and possible remedies if a run does not fit."""
    if memory.total > limit:
        parts = ", ".join(f"{name} {size:.1f}" for name, size in memory.table().items())
        raise ValueError(
            f"this run needs about {memory.total / GIB:.1f} GiB per rank ({parts}) and has"
            f" {limit / GIB:.1f}: use more ranks, fewer tokens per step, more micro-batches,"
            " parallel.recompute = true, a larger tp, or a smaller model"
        )
