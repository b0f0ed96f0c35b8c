"""Runs a benchmark on the ranks of torchrun, or starts two gloo ranks for it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import TCPStore  # type: ignore[attr-defined]

Rows = list[dict[str, Any]]
Measure = Callable[[torch.device], Rows]
Show = Callable[[Rows, torch.device, str], None]  # with the command that was run


def run_on_ranks(measure: Measure, show: Show, script: str) -> None:
    """Measures on all ranks; rank 0 shows the result.

    With ``DISTCA_SHARE_GPU=0`` all ranks of torchrun take that GPU.
    """
    if "RANK" in os.environ:
        ranks = os.environ["WORLD_SIZE"]
        _run(0, {}, measure, show, f"torchrun --nproc-per-node {ranks} {script}")
        return
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": "2",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    mp.spawn(_run, (environment, measure, show, f"python {script}"), 2)


def _run(
    rank: int, environment: dict[str, str], measure: Measure, show: Show, command: str
) -> None:
    os.environ |= environment | {"RANK": str(rank)} if environment else {}
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        index = os.environ.get("DISTCA_SHARE_GPU", os.environ["LOCAL_RANK"])
        device = torch.device("cuda", int(index))
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    rows = measure(device)
    if dist.get_rank() == 0:
        show(rows, device, command)
    dist.barrier()
    dist.destroy_process_group()
