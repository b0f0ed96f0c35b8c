"""What it costs that ranks announce every message to each other.

    python benchmarks/announcements.py                                      # two gloo ranks
    torchrun --nproc-per-node 4 benchmarks/announcements.py                 # NCCL, a GPU for each

Forward and backward of one layer, with announcements and without, in turns, at several sizes. The
result is the median of the differences of neighboring runs, with the middle half of them, relative
to a run without announcements. Announcements are left out by replacing the announce function of
``distca.dispatch.exchange``. With ``DISTCA_SHARE_GPU=0`` all ranks take that GPU.
"""

from __future__ import annotations

import json
import os
import platform
import time
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from own_ranks import run_on_ranks
from torch import Tensor

import distca
from distca.dispatch import exchange

RESULTS = Path(__file__).parent / "results"
ANNOUNCE = exchange.announce
CPU = {"heads": 8, "kv_heads": 2, "head_dim": 64}
GPU = {"heads": 32, "kv_heads": 8, "head_dim": 128}
# Tokens of the longest document: layers in a run, runs. On a GPU the host runs ahead of the device
# over several layers, as it does in training, and sends announcements ten times a second, so a run
# takes longer than that.
CPU_SIZES = {512: (1, 60), 2048: (1, 20)}
GPU_SIZES = {2048: (64, 60), 8192: (24, 30), 32768: (4, 12)}


def layers(attention: distca.CoreAttention, qkv: list[Tensor], plan: distca.Plan, n: int) -> float:
    """Returns the seconds of n layers forward and backward, with all ranks starting together."""
    synchronize(qkv[0].device)
    dist.barrier()
    start = time.perf_counter()
    outs = [attention(*qkv, plan) for _ in range(n)]
    for out in outs:
        out.sum().backward()
    synchronize(qkv[0].device)
    return time.perf_counter() - start


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(device: torch.device) -> list[dict[str, Any]]:
    attention, size, rows = distca.CoreAttention(), dist.get_world_size(), []
    on_gpu = device.type == "cuda"
    shape, dtype = (GPU, torch.bfloat16) if on_gpu else (CPU, torch.float32)
    for longest, (count, runs) in (GPU_SIZES if on_gpu else CPU_SIZES).items():
        documents = [[longest], *[[longest // 8] * 8] * (size - 1)]
        plan = distca.plan(documents, **shape, cost="h200" if on_gpu else "cpu")
        heads = (shape["heads"], shape["kv_heads"], shape["kv_heads"])
        options: dict[str, Any] = {"dtype": dtype, "device": device, "requires_grad": True}
        qkv = [torch.randn(longest, h, shape["head_dim"], **options) for h in heads]
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for number in range(2 * (runs + 2)):
            announced = number % 2 == (number // 2) % 2  # which of the two is first changes
            exchange.announce = ANNOUNCE if announced else lambda *_: None  # type: ignore[assignment]
            seconds[announced].append(layers(attention, qkv, plan, count) / count)
        exchange.announce = ANNOUNCE
        with_, without = (np.asarray(seconds[announced][2:]) for announced in (True, False))
        low, median, high = np.percentile(with_ - without, [25, 50, 75]) * 1e3
        base = float(np.median(without)) * 1e3
        rows.append(
            {
                "tokens": size * longest,
                "bytes": plan.traffic.total + plan.backward_traffic.total,
                "runs": runs,
                "layers": count,
                "layer_ms": base,
                "announcements_ms": float(median),
                "quartiles_ms": [float(low), float(high)],
                "percent": 100 * float(median) / base,
            }
        )
    return rows


def show(rows: list[dict[str, Any]], device: torch.device, command: str) -> None:
    ranks = int(os.environ["WORLD_SIZE"])
    card = torch.cuda.get_device_name() if device.type == "cuda" else platform.machine()
    shared = ", which they share" if "DISTCA_SHARE_GPU" in os.environ else ""
    kind = "NCCL" if device.type == "cuda" else "gloo"
    about = f"{date.today()}, torch {torch.__version__}, {ranks} {kind} ranks on {card}{shared}"
    name = "announcements" if kind == "gloo" else f"announcements_nccl_{ranks}"
    lines = [
        f"# Announcements of messages: {ranks} {kind} ranks",
        "",
        "Forward and backward of a layer, in which ranks announce four messages. The last three",
        "columns are differences of neighboring runs with and without announcements: median,",
        "middle half, and the median relative to a run without.",
        "",
        f"{about}: `{command}`",
        "",
        "| tokens | bytes sent | runs x layers | layer (ms) | announcements (ms) | middle half | |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        low, high = row["quartiles_ms"]
        lines.append(
            f"| {row['tokens']:,} | {row['bytes']:,} | {row['runs']} x {row['layers']}"
            f" | {row['layer_ms']:.2f} | {row['announcements_ms']:+.3f}"
            f" | {low:+.3f} to {high:+.3f} | {row['percent']:+.1f} % |"
        )
    folder = Path(os.environ.get("OUT", RESULTS))
    record = {"about": about, "command": command, "rows": rows}
    (folder / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    (folder / f"{name}.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    run_on_ranks(measure, show, "benchmarks/announcements.py")
