"""The memory that a rank of a run needs, what it has, and whether the one fits into the other."""

import math
import os
from dataclasses import replace

import torch

from distca.model.config import ModelConfig
from distca.pipeline.memory import GIB, Memory, estimate
from distca.pipeline.mesh import MeshShape
from distca.pipeline.schedule import Schedule
from distca.pipeline.stages import stage_layers
from distca.runtime.parallelize import Precision
from distca.runtime.rank_device import shared_bytes
from distca.train.config import Config


def memory_of(
    config: Config, parallel: MeshShape, model: ModelConfig, device: torch.device
) -> Memory:
    """Estimates the memory of a worker in the pipeline stage that needs most."""
    p, precision = config.parallel, Precision.named(config.parallel.precision, device)
    stages = stage_layers(model.layers, parallel.pp, p.stage_layers)
    held = Schedule.aligned(parallel.pp, p.micro_batches).in_flight
    sizes = [
        estimate(
            model.shape,
            parallel,
            tokens=config.train.tokens_per_step // (parallel.workers_per_stage * p.micro_batches),
            recompute=p.recompute,
            layers=stop - start,
            in_flight=count,
            parameters=model.num_parameters,
            compute_bytes=precision.compute.itemsize,
            reduce_bytes=precision.reduce.itemsize,
        )
        for (start, stop), count in zip(stages, held, strict=True)
    ]
    largest = max(sizes, key=lambda memory: memory.total)
    if device.type == "cpu" and config.train.saves:
        largest = replace(largest, checkpoint=largest.saved)
    return largest


def available_bytes(device: torch.device, num_ranks: int, limit_gib: float = 0.0) -> int:
    """Returns the bytes that a rank may use: the given limit, or its share of the device.

    num_ranks: those that share the device.
    """
    if limit_gib:
        return math.ceil(limit_gib * GIB)
    if device.type == "cpu":
        return host_bytes() // num_ranks
    total = torch.cuda.get_device_properties(device).total_memory
    return shared_bytes(total, num_ranks) if num_ranks > 1 else int(total * 0.95)


def host_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_host_memory(copies: int, limit: int) -> None:
    """Raises ValueError if the copies of checkpoints do not fit into the memory of the host."""
    if copies > limit:
        raise ValueError(
            f"checkpoints are copied to the host before they are written, which takes"
            f" {copies / GIB:.1f} GiB for the ranks of this node, and it has {limit / GIB:.1f}: use"
            " more nodes, or train.checkpoint_every = 0 and train.save_at_end = false"
        )


def check_memory(memory: Memory, limit: int) -> None:
    """Raises ValueError with the estimate and possible remedies if a run does not fit."""
    if memory.total > limit:
        parts = ", ".join(f"{name} {_shown(size)}" for name, size in memory.table().items())
        raise ValueError(
            f"this run needs about {_shown(memory.total / GIB)} GiB per rank ({parts}) and has"
            f" {_shown(limit / GIB)}: use more ranks, fewer tokens per step, more micro-batches,"
            " parallel.recompute = true, a larger tp, or a smaller model"
        )


def _shown(gib: float) -> str:
    return f"{gib:.1f}" if gib >= 1 else f"{gib:.2g}"
