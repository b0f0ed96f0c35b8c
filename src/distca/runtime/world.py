"""How a process becomes a rank of a run."""

import os
import socket
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import rendezvous

from distca.runtime.launched import mark_repeated, num_restarts
from distca.runtime.lost_ranks import watch_ranks
from distca.runtime.rank_device import local_device
from distca.runtime.waiting import open_to_signals

_NAMED = 3  # ranks in an error


def join_world() -> torch.device:
    """Joins the ranks of torchrun or ``distca train``, or starts a process group of one rank.

    Returns the device of this rank. Raises ValueError on all ranks if some of them have a GPU and
    others do not.
    """
    joins = "RANK" in os.environ and not dist.is_initialized()
    if joins:
        _check_variables()
    device = local_device()
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        if joins:
            store, rank, world_size = open_to_signals(partial(_meet, device.type))
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
        else:
            alone = torch.distributed.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(backend, store=alone, rank=0, world_size=1)
        watch_ranks()
    return device


def _check_variables() -> None:
    """Raises ValueError unless the variables of a launcher are complete, and numbers."""
    way_out = "start ranks with torchrun, or unset RANK for a process of its own"
    numbers = {}
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        value = os.environ.get(name, "")
        if not value:
            raise ValueError(f"RANK is set, but {name} is not or is empty: {way_out}")
        if name != "MASTER_ADDR":
            if not value.isdecimal():
                raise ValueError(f"{name} = {value!r} is no number: {way_out}")
            numbers[name] = int(value)
    if numbers["RANK"] >= numbers["WORLD_SIZE"]:
        raise ValueError(
            f"RANK = {numbers['RANK']} with WORLD_SIZE = {numbers['WORLD_SIZE']}: ranks are from 0"
            f" to WORLD_SIZE - 1; {way_out}"
        )


def _meet(device: str) -> tuple[Any, int, int]:
    """Waits for the other ranks; returns their store, the rank, and how many there are."""
    wait = distributed_c10d.default_pg_timeout
    found, rank, world_size = next(rendezvous("env://", timeout=wait))
    # The store of torchrun outlives its ranks: those that it restarts must not find the addresses
    # of earlier ones.
    store = distributed_c10d.PrefixStore(f"attempt {num_restarts()}", found)
    _check_devices(store, rank, world_size, device)
    return store, rank, world_size


def _check_devices(store: Any, rank: int, world_size: int, kind: str) -> None:
    """Raises ValueError on all ranks unless all have the same kind of device.

    A rank whose node has lost its GPUs would be a CPU rank, for which the others wait in the first
    collective over NCCL. This comes before the process group, which needs the same backend on all.
    """
    number = store.add(f"ranks on {kind}", 1)
    if number <= _NAMED:
        store.set(f"{kind} {number}", f"rank {rank} on {socket.gethostname()}")
    if store.add("ranks with a device", 1) == world_size:  # the last rank knows all others
        store.set("devices", _difference(store, world_size))
    if difference := store.get("devices").decode():
        error = ValueError(difference)
        mark_repeated(error, rank > 0)
        raise error


def _difference(store: Any, world_size: int) -> str:
    """Returns a sentence about ranks without a GPU if others have one, else nothing."""
    without = store.add("ranks on cpu", 0)
    if without in (0, world_size):
        return ""
    names = ", ".join(store.get(f"cpu {n}").decode() for n in range(1, min(without, _NAMED) + 1))
    more = f" and {without - _NAMED} more" if without > _NAMED else ""
    have = "has" if without == 1 else "have"
    return (
        f"{without} of {world_size} ranks {have} no GPU ({names}{more}), but all others have one:"
        " look at their drivers (nvidia-smi) and CUDA_VISIBLE_DEVICES, start without these nodes,"
        " or set CUDA_VISIBLE_DEVICES= for all ranks to run on the CPU"
    )
