"""Latent attention (MLA): bytes and time if keys and values travel, and if their latents do.

    python benchmarks/latent.py                                      # two gloo ranks on the CPU
    torchrun --nproc-per-node 4 benchmarks/latent.py                 # NCCL, a GPU for each
    DISTCA_SHARE_GPU=0 torchrun --nproc-per-node 4 benchmarks/latent.py  # NCCL, all on that GPU

Forward and backward of one layer of DeepSeek-V2-Lite and of DeepSeek-V3, both ways in turns, each
with the plan that suits it. A layer begins with latents, which home expands in both ways, and ends
with all gradients. The table before it is a calculation.
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
from distca.dispatch.transports.distributed import DistributedTransport
from distca.planning.costs.base import LINEAR_TFLOPS
from distca.planning.models import MODELS, ModelShape

RESULTS = Path(__file__).parent / "results"
SHAPES = [MODELS[name] for name in ("deepseek-v2-lite", "deepseek-v2", "deepseek-v3")]
WAYS = ("expanded", "latent")
# Tokens of the longest document, layers in a run, runs; DeepSeek-V2 has the heads of V3.
CPU_SIZES = {"deepseek-v2-lite": (512, 1, 5), "deepseek-v3": (256, 1, 3)}
GPU_SIZES = {"deepseek-v2-lite": (32768, 4, 8), "deepseek-v3": (16384, 2, 8)}
LINKS = {"NVLink, 360 GB/s": 360e9, "InfiniBand, 50 GB/s": 50e9}


class Counted(DistributedTransport):
    """Counts the bytes that this rank sends to others."""

    sent = 0

    def start(self, send: Tensor, recv: Tensor, send_bytes: Any, *rest: Any) -> Any:
        self.sent += sum(send_bytes)
        return super().start(send, recv, send_bytes, *rest)


class Layer:
    """One layer on this rank: random queries and latents, and the matrix that expands them."""

    def __init__(self, shape: ModelShape, tokens: int, dtype: torch.dtype, device: torch.device):
        self.shape = shape
        columns = shape.kv_heads * (shape.head_dim - shape.rope_dim + shape.value_dim)
        torch.manual_seed(1 + dist.get_rank())
        self.q = torch.randn(tokens, shape.heads, shape.head_dim, dtype=dtype, device=device)
        latent = torch.randn(tokens, shape.latent_dim, dtype=dtype, device=device)
        rotary = torch.randn(tokens, shape.rope_dim, dtype=dtype, device=device)
        torch.manual_seed(0)
        weight = torch.randn(columns, shape.latent_dim, dtype=dtype, device=device)
        self.factors = distca.Latent(latent, rotary, weight * shape.latent_dim**-0.5)
        self.leaves = [self.q, *self.factors]
        for leaf in self.leaves:
            leaf.requires_grad_()

    def run(self, attention: distca.CoreAttention, plan: distca.Plan, way: str) -> Tensor:
        latent, rotary, weight = self.factors
        plain, heads = self.shape.head_dim - self.shape.rope_dim, self.shape.kv_heads
        both = (latent @ weight.t()).unflatten(1, (heads, -1))
        k = torch.cat([both[..., :plain], rotary[:, None].expand(-1, heads, -1)], -1)
        factors = self.factors if way == "latent" else None
        return attention(self.q, k, both[..., plain:], plan, latent=factors)


def plan_of(shape: ModelShape, ranks: int, longest: int, way: str, cost: str) -> distca.Plan:
    sizes = {"heads": shape.heads, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim}
    sizes |= {"v_head_dim": shape.value_dim}
    if way == "latent":
        sizes |= {"latent_dim": shape.latent_dim, "rope_dim": shape.rope_dim}
    documents = [[longest], *[[longest // 8] * 8] * (ranks - 1)]
    return distca.plan(documents, **sizes, cost=cost)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def seconds(layer: Layer, attention: Any, plan: distca.Plan, way: str, count: int) -> float:
    """Returns the seconds of a layer forward and backward, with all ranks starting together."""
    device = layer.q.device
    synchronize(device)
    dist.barrier()
    start = time.perf_counter()
    outs = [layer.run(attention, plan, way) for _ in range(count)]
    for out in outs:
        out.sum().backward()
    synchronize(device)
    return (time.perf_counter() - start) / count


def gradients(layer: Layer, attention: Any, plan: distca.Plan, way: str) -> list[Tensor]:
    """Returns the gradients of a layer, that of the matrix summed over ranks."""
    for leaf in layer.leaves:
        leaf.grad = None
    layer.run(attention, plan, way).sum().backward()
    grads = [leaf.grad.float() for leaf in layer.leaves if leaf.grad is not None]
    dist.all_reduce(grads[-1])
    return grads


def measure(device: torch.device) -> list[dict[str, Any]]:
    on_gpu, ranks, rows = device.type == "cuda", dist.get_world_size(), []
    dtype, cost = (torch.bfloat16, "h200") if on_gpu else (torch.float32, "cpu")
    for name, (longest, count, runs) in (GPU_SIZES if on_gpu else CPU_SIZES).items():
        shape = MODELS[name]
        layer = Layer(shape, longest, dtype, device)
        transport = Counted(None, None)
        attention = distca.CoreAttention(transport=transport)
        plans = {way: plan_of(shape, ranks, longest, way, cost) for way in WAYS}
        found = {way: gradients(layer, attention, plans[way], way) for way in WAYS}
        pairs = zip(*found.values(), strict=True)
        errors = [float((a - b).norm() / a.norm().clamp_min(1e-9)) for a, b in pairs]
        taken: dict[str, list[float]] = {way: [] for way in WAYS}
        sent = dict.fromkeys(WAYS, 0)
        for number in range(runs + 1):
            for way in WAYS[:: 1 if number % 2 else -1]:
                transport.sent = 0
                once = seconds(layer, attention, plans[way], way, count)
                sent[way] = transport.sent // count
                taken[way] += [once] if number else []
        totals = torch.tensor([sent[way] for way in WAYS], device=device)
        dist.all_reduce(totals)
        for index, way in enumerate(WAYS):
            plan = plans[way]
            rows.append(
                {
                    "model": name,
                    "way": way,
                    "tokens": ranks * longest,
                    "dtype": str(dtype).removeprefix("torch."),
                    "sent_bytes": int(totals[index]),
                    "planned_bf16_bytes": plan.traffic.total + plan.backward_traffic.total,
                    "layer_ms": 1e3 * float(np.median(taken[way])),
                    "quartiles_ms": [1e3 * x for x in np.percentile(taken[way], [25, 75])],
                    "largest_difference": max(errors),
                }
            )
    return rows


def calculated() -> list[str]:
    """Returns the table of what one key costs, sent to one server, forward and backward."""
    lines = [
        "| one key, forward + backward | " + " | ".join(shape.name for shape in SHAPES) + " |",
        "|---|" + "---|" * len(SHAPES),
    ]

    def row(what: str, values: list[str]) -> None:
        lines.append(f"| {what} | " + " | ".join(values) + " |")

    # Keys are sent forward and backward, and their gradients are sent back.
    row("bytes expanded", [f"{3 * s.kv_memory_bytes:,}" for s in SHAPES])
    row("bytes of latents", [f"{3 * s.kv_bytes:,}" for s in SHAPES])
    # Forward: expand. Backward: expand, and the gradients of latents and of the matrix.
    flops = [4 * s.expansion_bytes for s in SHAPES]  # 2 FLOPs for each element of 2 bytes, 4 times
    row("MFLOP to expand on the server", [f"{f / 1e6:.1f}" for f in flops])
    work = [f / LINEAR_TFLOPS / 1e3 for f in flops]
    row(f"ns of that at {LINEAR_TFLOPS:.0f} TFLOP/s", [f"{ns:.0f}" for ns in work])
    saved = [3 * (s.kv_memory_bytes - s.kv_bytes) for s in SHAPES]
    for link, rate in LINKS.items():
        row(f"ns of bytes saved, {link}", [f"{1e9 * n / rate:.0f}" for n in saved])
    row(
        "pairs of core attention that take as long as to expand",
        [f"{f / (3.5 * s.flops_per_pair):.0f}" for f, s in zip(flops, SHAPES, strict=True)],
    )
    row(
        "matrix for a server without weights, MB",
        [f"{s.expansion_bytes / 1e6:.1f}" for s in SHAPES],
    )
    row(
        "received keys from which that is worth it",
        [f"{s.expansion_bytes / (s.kv_memory_bytes - s.kv_bytes):.0f}" for s in SHAPES],
    )
    return lines


def show(rows: list[dict[str, Any]], device: torch.device, command: str) -> None:
    ranks = int(os.environ["WORLD_SIZE"])
    card = torch.cuda.get_device_name() if device.type == "cuda" else platform.machine()
    shared = ", which they share" if "DISTCA_SHARE_GPU" in os.environ else ""
    kind = "NCCL" if device.type == "cuda" else "gloo"
    about = f"{date.today()}, torch {torch.__version__}, {ranks} {kind} ranks on {card}{shared}"
    lines = [
        f"# Latent attention, both ways: {ranks} {kind} ranks",
        "",
        "Calculated, in bfloat16:",
        "",
        *calculated(),
        "",
        "Measured: forward and backward of one layer with its expansion at home. Bytes are those",
        "of all ranks. Differences are relative, of the gradients of both ways.",
        "",
        f"{about}: `{command}`",
        "",
        "| model | tokens | travels | dtype | bytes sent | layer (ms) | middle half | difference |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        low, high = row["quartiles_ms"]
        lines.append(
            f"| {row['model']} | {row['tokens']:,} | {row['way']} | {row['dtype']}"
            f" | {row['sent_bytes']:,} | {row['layer_ms']:.1f} | {low:.1f} to {high:.1f}"
            f" | {row['largest_difference']:.0e} |"
        )
    folder = Path(os.environ.get("OUT", RESULTS))
    name = "latent" if kind == "gloo" else f"latent_nccl_{ranks}"
    record = {"about": about, "command": command, "rows": rows}
    (folder / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    (folder / f"{name}.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    run_on_ranks(measure, show, "benchmarks/latent.py")
