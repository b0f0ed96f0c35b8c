"""What a machine has for training: versions, GPUs, kernels, NCCL, MPS, memory and links."""

from __future__ import annotations

import os
import platform
import shutil
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from itertools import permutations
from statistics import median
from typing import Any

import torch

from distca import __version__
from distca.attention.backends.base import Traits
from distca.attention.backends.choice import backends
from distca.dispatch.tensors import TensorSpec
from distca.planning.masks import CAUSAL, Mask
from distca.runtime import mps, nccl

COPY_BYTES, ROUNDS = 256 << 20, 5
MOST_PAIRS = 56  # of GPUs: all of a node with eight
# Packages, and the extra of distca that installs each.
OPTIONAL = {
    "triton": "",
    "flash-attn-4": "fa4",
    "transformers": "transformers",
    "megatron-core": "megatron",
    "torchtitan": "torchtitan",
    "safetensors": "hf",
    "plotly": "report",
    "tensorboard": "tensorboard",
}


def versions() -> dict[str, str | None]:
    """Returns the versions of distca and of the packages that it uses; None: not installed."""
    found: dict[str, str | None] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "distca": __version__,  # it may run from its sources, without being installed
    }
    for package in OPTIONAL:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def gpus() -> list[dict[str, Any]]:
    """Returns name, compute capability, SMs and memory of each GPU."""
    found = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        properties = torch.cuda.get_device_properties(index)
        found.append(
            {
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "sms": properties.multi_processor_count,
                "free_bytes": free,
                "total_bytes": total,
            }
        )
    return found


def kernels() -> list[dict[str, str | None]]:
    """Returns the attention backends in the order of choice; ``refusal`` is None if one fits.

    The layer is causal, in bf16 on a GPU and in float32 on a CPU, with heads of 128.
    """
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    dtype = torch.bfloat16 if on_gpu else torch.float32
    traits = Traits.of(TensorSpec(32, 8, 128, 128, dtype, device), [Mask(CAUSAL)])
    return [{"backend": one.name, "refusal": one.refusal(traits)} for one in backends()]


def sharing() -> dict[str, str | None]:
    """Returns the NCCL of torch, one with which ranks share a GPU, and whether there is MPS."""
    own, refusal, shared = nccl.loaded_version(), None, None
    try:
        shared = str(nccl.find_nccl())
    except ValueError as error:
        refusal = str(error)
    control = shutil.which(mps.CONTROL)
    return {
        "nccl": nccl.version_text(own) if own else None,
        "sharing": shared,
        "refusal": refusal,
        "mps": control,
    }


def memory() -> dict[str, int]:
    """Returns the cores, the memory of the host, and what is free on the disk of this folder."""
    pages, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return {
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1,
        "host_bytes": pages * page,
        "disk_free_bytes": shutil.disk_usage(".").free,
    }


def links() -> dict[str, float]:
    """Measures copies, in bytes per second: inside GPU 0, to it from the host, between GPUs.

    Of all pairs of GPUs, the slowest and the fastest count.
    """
    if not torch.cuda.is_available():
        return {}
    here = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda:0")
    host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    again = torch.empty_like(here)
    found = {
        "inside": 2 * _bytes_per_s(lambda: again.copy_(here)),  # read and written
        "from_host": _bytes_per_s(lambda: here.copy_(host, non_blocking=True)),
    }
    pairs = list(permutations(range(torch.cuda.device_count()), 2))[:MOST_PAIRS]
    rates = []
    for source, target in pairs:
        there = torch.empty(COPY_BYTES, dtype=torch.uint8, device=f"cuda:{target}")
        from_ = here if source == 0 else torch.empty_like(there, device=f"cuda:{source}")
        rates.append(_bytes_per_s(lambda to=there, a=from_: to.copy_(a)))  # type: ignore[misc]
    if rates:
        found |= {"slowest_pair": min(rates), "fastest_pair": max(rates)}
    return found


def _bytes_per_s(copy: Callable[[], object]) -> float:
    seconds = []
    for _ in range(ROUNDS + 1):  # the first one warms up
        _synchronize()
        began = time.perf_counter()
        copy()
        _synchronize()
        seconds.append(time.perf_counter() - began)
    return COPY_BYTES / median(seconds[1:])


def _synchronize() -> None:
    for index in range(torch.cuda.device_count()):
        torch.cuda.synchronize(index)
