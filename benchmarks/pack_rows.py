"""Gathering and scattering the rows of one layer: run by run with slices, and with one kernel each.

    python benchmarks/pack_rows.py            512 ranks, prolong 512K; about two minutes on an H200
    python benchmarks/pack_rows.py --quick    a small plan on any device, to try the script

One rank of the plan is timed: the one with the most pieces among those sampled. Layers run without
attention and with an exchange that takes no time, so all that is left is ours. Both ways have to
give the same bits. Writes pack_rows.md and pack_rows.json into results/, or into --out.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from distca.attention.backends.base import Attended, Gradients, Saved
from distca.attention.core import CoreAttention
from distca.attention.passes import BackwardPass, ForwardPass
from distca.attention.prepared import PreparedPlan
from distca.dispatch import moves, slices
from distca.dispatch.layout import Layout
from distca.dispatch.tensors import TensorSpec
from distca.dispatch.transports.base import Wait
from distca.dispatch.transports.throttled import ThrottledTransport
from distca.dispatch.wire import Message
from distca.measure.profiling import device_name
from distca.planning.masks import Mask
from distca.planning.models import ModelShape
from distca.planning.plan import Plan
from distca.sim.cluster import Link
from distca.sim.isolated import Case

HEADS = (4, 1, 128)  # an eighth of Llama-3-8B: heads, key/value heads, head size
ROUNDS = 7
HEAD_START_CYCLES = 50_000_000  # the host launches for about 30 ms before the device begins
Record = dict[str, Any]


class NoAttention:
    """A backend that computes nothing."""

    def forward(self, q: Tensor, *_: Any) -> Attended:
        return Attended(q.clone(), q.new_zeros(q.shape[:2], dtype=torch.float32))

    def backward(self, grad_out: Tensor, saved: Saved, *_: Any) -> Gradients:
        return Gradients(saved.q.clone(), saved.k.clone(), saved.v.clone())


class Instantaneous(ThrottledTransport):
    """Sends nothing; what is received is what lies in the buffer."""

    def start(self, send: Tensor, recv: Tensor, *_: Any) -> Wait:
        recv.zero_()
        return lambda: None


@dataclass(frozen=True)
class Timed:
    host_s: float
    device_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=512)
    parser.add_argument("--quick", action="store_true", help="a small plan, to try the script")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    here = Path(__file__).parent
    out = options.out or (here.parent / "build/pack_rows" if options.quick else here / "results")
    out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    ranks, tokens = (16, 4096) if options.quick else (options.ranks, 65536)
    plan = planned(ranks, tokens)
    rank = max(range(0, ranks, max(ranks // 32, 1)), key=lambda rank: num_runs(plan, rank))
    ways: dict[str, Any] = {"slices": slices}
    if device.type == "cuda":
        from distca.dispatch import kernels

        ways["kernels"] = kernels
    results = {
        "command": " ".join(["python benchmarks/pack_rows.py", *sys.argv[1:]]),
        "date": str(date.today()),
        "device": device_name(device),
        "torch": torch.__version__,
        "plan": f"{ranks} ranks, prolong, {8 * tokens // 1024}K, balanced, ping-pong; rank {rank},"
        f" {num_runs(plan, rank)} runs of rows in the forward pass",
        "rows": compared(plan, rank, ways, device),
    }
    (out / "pack_rows.json").write_text(json.dumps(results, indent=1) + "\n")
    text = report(results)
    (out / "pack_rows.md").write_text(text)
    print(text)
    if not all(row["same bits"] for row in results["rows"]):
        sys.exit("the two ways differ")


def planned(ranks: int, tokens: int) -> Plan:
    """The forward plan of one half; its backward tasks are in it too."""
    case = Case(
        ModelShape("layer", *HEADS), (Mask.parse("causal"),), ranks, "prolong", 8 * tokens, tokens,
        Link(50e9, 20e-6), cost="h200", placement="balanced", ping_pong=True,
    )  # fmt: skip
    return case.plan().slots[0][0][0]


def num_runs(plan: Plan, rank: int) -> int:
    layout = Layout.of(plan, rank)
    rows = [rows for call in (*layout.local, *layout.remote) for rows in (call.q, call.kv)]
    rows += [rows for peers in (layout.q, layout.kv) for rows in peers.send.values()]
    return sum(len(each.runs) for each in rows)


def compared(plan: Plan, rank: int, ways: dict[str, Any], device: torch.device) -> list[Record]:
    """One record for each part of a layer, with the seconds of each way."""
    dtype = torch.bfloat16
    generator = torch.Generator().manual_seed(0)

    def noise(heads: int) -> Tensor:
        tokens = int(plan.placement.tokens[rank])
        return torch.randn(tokens, heads, HEADS[2], generator=generator).to(dtype).to(device)

    q, k, v, grad_out = (noise(heads) for heads in (HEADS[0], *HEADS[1:2] * 2, HEADS[0]))
    transport = Instantaneous(rank, plan.devices.num_ranks, bytes_per_s=1e18)
    records: dict[str, Record] = {}
    bits: dict[str, list[Tensor]] = {}
    for way, module in ways.items():
        moves._on = lambda device, module=module: module  # type: ignore[assignment]
        attention = CoreAttention(transport=transport, backend="reference")
        spec = TensorSpec.of(q, k, v)
        made = attention.prepare(spec, forward=plan, backward=plan, announce=False)
        prepared = replace(made, backend=NoAttention())  # type: ignore[arg-type]
        for name, (run, num_bytes) in parts(prepared, q, k, v, grad_out).items():
            record = records.setdefault(name, {"part": name, "MB": num_bytes / 1e6})
            found = run()
            taken = timed(run, device)
            record |= {
                f"{way} host ms": taken.host_s * 1e3,
                f"{way} device ms": taken.device_s * 1e3,
            }
            if num_bytes:
                record[f"{way} GB/s"] = 2 * num_bytes / taken.device_s / 1e9  # read and written
            before = bits.setdefault(name, found)
            same = all(torch.equal(a, b) for a, b in zip(before, found, strict=True))
            record["same bits"] = same
        del attention, made, prepared
    return list(records.values())


def parts(
    prepared: PreparedPlan, q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor
) -> dict[str, tuple[Callable[[], list[Tensor]], int]]:
    """What is timed, and how many bytes it moves; layers move them several times."""
    assert prepared.forward is not None
    assert prepared.backward is not None
    attended = ForwardPass(prepared, q, k, v).combine()
    saved = Saved(q, k, v, *attended)
    there, back = prepared.forward.messages.dispatch, prepared.backward.messages.dispatch

    def gathered(message: Message, tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        sent = torch.zeros(message.send.num_bytes, dtype=torch.uint8, device=q.device)

        def gather() -> list[Tensor]:
            message.move([*tensors, sent])
            return [sent]

        return gather

    return {
        "forward dispatch": (gathered(there, (q, k, v)), there.send.num_bytes),
        "backward dispatch": (gathered(back, (*saved, grad_out)), back.send.num_bytes),
        "forward, a whole layer": (lambda: list(ForwardPass(prepared, q, k, v).combine()), 0),
        "backward, a whole layer": (
            lambda: list(BackwardPass(prepared, grad_out, saved).combine()), 0,
        ),
    }  # fmt: skip


def timed(run: Callable[[], object], device: torch.device) -> Timed:
    """Medians of some rounds, after one that warms up."""
    rounds = []
    for _ in range(ROUNDS + 1):
        if device.type == "cuda":
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize(device)
            torch.cuda._sleep(HEAD_START_CYCLES)
            start.record()
        began = time.perf_counter()
        run()
        host_s = device_s = time.perf_counter() - began
        if device.type == "cuda":
            stop.record()
            stop.synchronize()
            device_s = start.elapsed_time(stop) / 1e3
        rounds.append((host_s, device_s))
    return Timed(*map(median, zip(*rounds[1:], strict=True)))


def report(results: Record) -> str:
    columns = list(dict.fromkeys(name for row in results["rows"] for name in row))
    lines = [
        "# Gathering and scattering rows",
        "",
        f"`{results['command']}`, {results['date']}, {results['device']},"
        f" torch {results['torch']}.",
        "",
        f"{results['plan']}. bfloat16, {HEADS[0]} heads, {HEADS[1]} for keys, of size {HEADS[2]}.",
        "A whole layer runs without attention. GB/s are bytes read and written.",
        "",
        "| " + " | ".join(columns) + " |",
        "|" + "---|" * len(columns),
    ]
    lines += [
        "| " + " | ".join(shown(row.get(c, "")) for c in columns) + " |" for row in results["rows"]
    ]
    return "\n".join(lines) + "\n"


def shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.3f}" if isinstance(value, float) and value else str(value or "")


if __name__ == "__main__":
    main()
