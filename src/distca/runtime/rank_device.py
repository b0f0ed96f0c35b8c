"""The device of a rank: a GPU of its own, one that all ranks of a machine share, or the CPU.

``distca ... --share-gpu`` sets DISTCA_SHARE_GPU to the number of the shared GPU. Under torchrun,
users set it themselves.
"""

import os

import torch

from distca.runtime.nccl import SHARING, loaded_version, version_text

SHARE_GPU = "DISTCA_SHARE_GPU"  # environment variable with the number of the GPU to share
SHARE_BYTES = "DISTCA_SHARE_BYTES"  # the same with the bytes for tensors of each of its ranks
MULTI_RANK = "NCCL_MULTI_RANK_GPU_ENABLE"  # without it, NCCL refuses two ranks on one GPU
CONTEXT_BYTES = 1 << 30  # of a rank beside its tensors: CUDA's context, kernels, NCCL's buffers
LEAST_BYTES = CONTEXT_BYTES * 5 // 4  # with less, a rank can hold next to no tensors


def local_device() -> torch.device:
    """Returns the device of this rank, and makes it the current one.

    Raises ValueError for a rank without a GPU on a machine that has some: on the CPU it would hold
    up all others. A rank that shares its GPU gets its share of the memory and no more.
    """
    num_gpus, shared = torch.cuda.device_count(), _variable(SHARE_GPU)
    if not num_gpus and shared is None:
        return torch.device("cpu")
    if shared is None:
        index = _own_gpu(num_gpus)
    else:
        index = shared
        _check_shared(index, num_gpus)
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    if shared is not None:
        total = torch.cuda.get_device_properties(device).total_memory
        share = shared_bytes(total, _local_ranks())
        torch.cuda.set_per_process_memory_fraction(min(share / total, 1.0), device)
    return device


def shares_gpu() -> bool:
    """Returns whether this rank shares its GPU with the other ranks of its machine."""
    return SHARE_GPU in os.environ


def shared_bytes(total: int, num_ranks: int) -> int:
    """Returns the bytes for the tensors of this rank: what the launcher has found, if it has.

    total: of the GPU. Ranks cannot see how much of it was free before they started.
    """
    return _variable(SHARE_BYTES) or rank_bytes(total, num_ranks)


def rank_bytes(available: int, num_ranks: int) -> int:
    """Returns the bytes for the tensors of one of several ranks that share a GPU."""
    share = available // num_ranks
    if share < LEAST_BYTES:
        raise ValueError(
            f"{num_ranks} ranks need at least {num_ranks * LEAST_BYTES / (1 << 30):.3g} GiB on"
            f" the GPU that they share, and there are {available / (1 << 30):.3g}: start at most"
            f" {available // LEAST_BYTES}, or end what else runs on it (nvidia-smi lists it)"
        )
    return share - CONTEXT_BYTES


def _own_gpu(num_gpus: int) -> int:
    local = _variable("LOCAL_RANK")
    if local is None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(
            "RANK and WORLD_SIZE are set, but not LOCAL_RANK, which chooses the GPU of a rank:"
            " start ranks with torchrun, or set LOCAL_RANK to 0, 1, ... on each node"
        )
    if (local or 0) >= num_gpus:
        raise ValueError(
            f"LOCAL_RANK is {local}, but only {num_gpus} GPUs are visible: each rank needs its own."
            f" Start at most {num_gpus} ranks on this node; set LOCAL_RANK=0 if each rank sees only"
            f" its own GPU, {SHARE_GPU}=0 if all are to share one, or CUDA_VISIBLE_DEVICES= to"
            " run on the CPU"
        )
    return local or 0


def _check_shared(index: int, num_gpus: int) -> None:
    if index >= num_gpus:
        raise ValueError(
            f"{SHARE_GPU} is {index}, but {num_gpus} GPUs are visible: give the number of one of"
            " them, counted from 0, or unset it"
        )
    os.environ.setdefault(MULTI_RANK, "1")
    if _local_ranks() > 1 and (version := loaded_version()) < SHARING:
        raise ValueError(
            f"NCCL {version_text(version)} does not let ranks share a GPU, which takes"
            f" {version_text(SHARING)} or later: start them with --share-gpu, which looks for a"
            " newer one, or set LD_PRELOAD to its libnccl.so.2"
        )


def _local_ranks() -> int:
    return _variable("LOCAL_WORLD_SIZE") or int(os.environ.get("WORLD_SIZE", "1"))


def _variable(name: str) -> int | None:
    """Returns a launcher's variable; None if it is not set."""
    text = os.environ.get(name)
    if text is not None and not text.isdecimal():
        raise ValueError(f"{name} is {text!r}: give a number, 0 or more, or unset it")
    return None if text is None else int(text)
