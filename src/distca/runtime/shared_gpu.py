"""One GPU for all ranks of a run: a rehearsal of a run on many GPUs.

Ranks on one GPU exchange data over NCCL as they would on many, so pipelines, servers and exchanges
run as they will there. This takes an NCCL that allows it, MPS, so that ranks run side by side, and
memory for all of them. Each rank has its share of the SMs, so one that waits gives nothing to the
others, as on a GPU of its own.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distca.runtime.mps import CONTROL, mps, server_ids
from distca.runtime.nccl import Nccl, find_nccl

THREADS, MAX_CTAS = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "NCCL_MAX_CTAS"
CLUSTER_SIZE = "NCCL_CGA_CLUSTER_SIZE"
MPS_CLIENTS = 48  # processes that MPS serves on a GPU
CTAS = 32  # of all ranks: they must find room on the GPU together, or they wait for each other
READY_S = 30.0  # how long a server may need until processes can use it
PROBE_S = 30.0  # how long one of them may take: a server that was left unusable does not answer
# cudaErrorMps*, and "devices are busy or unavailable" while an earlier server ends.
NOT_READY = (46, 805, 806, 807)


@dataclass(frozen=True)
class SharedGpu:
    """A GPU that is ready for ranks."""

    num_ranks: int
    variables: Mapping[str, str]  # environment of the ranks
    name: str
    sms: int  # that a rank can use
    rank_bytes: int  # for the tensors of a rank
    nccl: Nccl
    side_by_side: bool

    def __str__(self) -> str:
        how = "through MPS" if self.side_by_side else "in turns"
        return (
            f"{self.num_ranks} ranks share one {self.name}: {self.sms} SMs and"
            f" {self.rank_bytes / (1 << 30):.1f} GiB each, {how}, with {self.nccl}"
        )


@contextmanager
def share_gpu(num_ranks: int, logs: Path, *, side_by_side: bool = True) -> Iterator[SharedGpu]:
    """Prepares the first visible GPU for ranks that share it, until the context ends.

    side_by_side: through MPS, each with its share of the SMs. Otherwise ranks take turns, which is
        much slower, but the death of one does not reach the others: MPS reports the fault of a
        process that is killed in the middle of a kernel to all of its processes.

    Variables that are set already stay as they are: the share of the SMs, and the thread blocks
    that NCCL may use, and in clusters of how many. MPS writes to ``logs``. Raises ValueError if
    ranks cannot share the GPU.
    """
    # Imports torch, which `distca --help` must not wait for.
    from distca.runtime.rank_device import MULTI_RANK, SHARE_BYTES, SHARE_GPU, rank_bytes

    if side_by_side and num_ranks > MPS_CLIENTS:
        raise ValueError(
            f"{num_ranks} ranks cannot share a GPU: MPS serves {MPS_CLIENTS} processes on one;"
            f" start at most {MPS_CLIENTS}"
        )
    nccl = find_nccl()
    with mps(logs) if side_by_side else nullcontext(dict[str, str]()) as variables:
        variables |= {SHARE_GPU: "0", MULTI_RANK: "1"}
        # By default, thread blocks come in clusters of four, which need four free SMs that lie next
        # to each other. Between those of other ranks that wait, they may never find them.
        shares = {MAX_CTAS: nccl_ctas(num_ranks), CLUSTER_SIZE: 0}
        if side_by_side:
            shares[THREADS] = max(100 // num_ranks, 1)
        variables |= {name: os.environ.get(name, str(value)) for name, value in shares.items()}
        if nccl.preload is not None:
            others = os.environ.get("LD_PRELOAD")
            variables["LD_PRELOAD"] = ":".join(filter(None, (str(nccl.preload), others)))
        gpu = _probe(os.environ | variables, logs if side_by_side else None)
        memory = rank_bytes(gpu["free_bytes"], num_ranks)
        variables[SHARE_BYTES] = str(memory)
        yield SharedGpu(num_ranks, variables, gpu["name"], gpu["sms"], memory, nccl, side_by_side)


def nccl_ctas(num_ranks: int) -> int:
    """Returns how many thread blocks NCCL may use on each rank, unless another number is set."""
    return max(CTAS // num_ranks, 1)


def _probe(environment: Mapping[str, str], logs: Path | None) -> dict[str, Any]:
    """Uses the GPU as a rank would, as soon as MPS lets it; returns what it found.

    logs: of MPS; None without it.
    """
    deadline = time.monotonic() + READY_S
    while "error" in (found := _run_probe(environment)):
        if logs is None:
            raise ValueError(
                f"the GPU cannot be used ({found['error']}): end what else runs on it (nvidia-smi"
                " lists it)"
            )
        if found["code"] not in NOT_READY or time.monotonic() > deadline:
            raise ValueError(
                f"the GPU cannot be used through MPS ({found['error']}): {_way_out(logs)}"
            )
        time.sleep(0.5)
    if logs is not None and not server_ids(environment):
        raise ValueError(f"MPS is running, but did not serve a process: {_way_out(logs)}")
    return found


def _way_out(logs: Path) -> str:
    return (
        f"see its logs in {logs}, end what else runs on the GPU (nvidia-smi lists it), and an MPS"
        f" server that was left unusable with `echo quit | {CONTROL}`"
    )


def _run_probe(environment: Mapping[str, str]) -> dict[str, Any]:
    try:
        ran = subprocess.run(
            [sys.executable, "-P", "-m", "distca.runtime.gpu_probe"],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PROBE_S,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {PROBE_S:.0f} s", "code": 0}
    if ran.returncode:
        last = (ran.stderr.strip().splitlines() or [f"exit status {ran.returncode}"])[-1]
        return {"error": last, "code": 0}
    found: dict[str, Any] = json.loads(ran.stdout)
    return found
