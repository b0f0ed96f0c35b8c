"""What it costs that ranks announce every message to each other before it is sent.

    python benchmarks/announcements.py

Two gloo ranks on the CPU run forward and backward of one layer, with announcements and without,
in turns, at several sizes. The result is the median of the differences of neighboring runs, with
the middle half of them, relative to a run without announcements. Announcements are left out by
replacing the announce function of ``distca.dispatch.exchange``.
"""

from __future__ import annotations

import json
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import distca
from distca.dispatch import exchange

RESULTS = Path(__file__).parent / "results" / "announcements"
SHAPE = {"heads": 8, "kv_heads": 2, "head_dim": 64}
LONGEST = {512: 60, 2048: 30, 4096: 12}  # tokens of the longest document: runs
ANNOUNCE = exchange.announce


def layer(attention: distca.CoreAttention, qkv: list[Tensor], plan: distca.Plan) -> float:
    """Returns the seconds of forward and backward, with both ranks starting together."""
    dist.barrier()
    start = time.perf_counter()
    attention(*qkv, plan).sum().backward()
    return time.perf_counter() - start


def measure(rank: int, store: str, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    attention = distca.CoreAttention()
    rows: list[dict[str, Any]] = []
    for longest, runs in LONGEST.items():
        plan = distca.plan([[longest], [longest // 8] * 8], **SHAPE, cost="cpu")
        heads = (SHAPE["heads"], SHAPE["kv_heads"], SHAPE["kv_heads"])
        qkv = [torch.randn(longest, h, SHAPE["head_dim"], requires_grad=True) for h in heads]
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for number in range(2 * (runs + 2)):
            announced = number % 2 == (number // 2) % 2  # which of the two is first changes
            exchange.announce = ANNOUNCE if announced else lambda *_: None  # type: ignore[assignment]
            seconds[announced].append(layer(attention, qkv, plan))
        exchange.announce = ANNOUNCE
        with_, without = (np.asarray(seconds[announced][2:]) for announced in (True, False))
        low, median, high = np.percentile(with_ - without, [25, 50, 75]) * 1e3
        base = float(np.median(without)) * 1e3
        rows.append(
            {
                "tokens": 2 * longest,
                "bytes": plan.traffic.total + plan.backward_traffic.total,
                "runs": runs,
                "layer_ms": base,
                "announcements_ms": float(median),
                "quartiles_ms": [float(low), float(high)],
                "percent": 100 * float(median) / base,
            }
        )
    if rank == 0:
        Path(out).write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        mp.spawn(measure, (f"file://{folder}/store", str(out)), 2)
        rows = json.loads(out.read_text())
    about = {
        "command": "python benchmarks/announcements.py",
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, 2 ranks with a thread each",
        **SHAPE,
    }
    RESULTS.with_suffix(".json").write_text(
        json.dumps({"about": about, "rows": rows}, indent=1) + "\n"
    )
    lines = [
        "# Announcements of messages",
        "",
        "Forward and backward of one layer on two gloo ranks, which announce four messages. The",
        "last three columns are differences of neighboring runs with and without announcements:",
        "median, middle half, and the median relative to a run without.",
        "",
        f"`{about['command']}`, torch {about['torch']}, {about['machine']}, float32.",
        "",
        "| tokens | bytes sent | runs | layer (ms) | announcements (ms) | middle half (ms) | |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        low, high = row["quartiles_ms"]
        lines.append(
            f"| {row['tokens']:,} | {row['bytes']:,} | {row['runs']} | {row['layer_ms']:.1f}"
            f" | {row['announcements_ms']:+.2f} | {low:+.2f} to {high:+.2f}"
            f" | {row['percent']:+.1f} % |"
        )
    RESULTS.with_suffix(".md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
