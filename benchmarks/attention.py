"""Attention on one GPU: exactness, fused calls of real plans, overhead, and replay rank by rank.

    python benchmarks/attention.py                   all parts, about ten minutes on an H200
    python benchmarks/attention.py --only replay     one part; results of the others are kept

Writes results/attention.md and attention.json next to this file. Llama-3-8B heads (32 heads, 8
key/value heads, head size 128), bfloat16, causal, 128K tokens per rank unless stated otherwise.
Random data, timed with device events; medians of rounds in which the compared variants alternate.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from calibration import TimedCall, calibrated
from torch import Tensor

from distca.attention.backends.base import Backend, Saved, Traits
from distca.attention.backends.choice import backends
from distca.attention.backends.packed import PackedCall
from distca.attention.backends.reference import Reference
from distca.attention.core import CoreAttention
from distca.attention.passes import BackwardPass, ForwardPass
from distca.data.lengths import distribution
from distca.dispatch.layout import Layout
from distca.dispatch.tensors import TensorSpec
from distca.dispatch.transports.throttled import ThrottledTransport
from distca.planning.api import place_and_plan
from distca.planning.api import plan as make_plan
from distca.planning.costs.analytic import analytic_cost
from distca.planning.costs.base import CostModel
from distca.planning.masks import Mask
from distca.planning.models import model_shape
from distca.planning.placement import Placement
from distca.planning.plan import Plan
from distca.planning.policies import policy_of

MODEL = model_shape("llama3-8b")
CONTEXT = 131072
SCALE = MODEL.head_dim**-0.5
ROUNDS = 3
DEVICE = torch.device("cuda")
WAYS = ("forward", "backward")
Record = dict[str, Any]


# -- measuring ---------------------------------------------------------------------------------


def seconds(work: Mapping[str, Callable[[], object]], rounds: int = ROUNDS) -> dict[str, float]:
    """Median device seconds of each, taken in turns after a warm-up."""
    times: dict[str, list[float]] = {name: [] for name in work}
    for number in range(rounds + 1):
        for name, run in work.items():
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            stop.record()
            stop.synchronize()
            if number:
                times[name].append(start.elapsed_time(stop) / 1e3)
    return {name: median(taken) for name, taken in times.items()}


class Noise:
    """Random rows for any call, drawn once."""

    def __init__(self) -> None:
        self._rows: dict[int, Tensor] = {}

    def __call__(self, rows: int, heads: int, number: int = 0) -> Tensor:
        """Different rows for different numbers."""
        first = number * 1024
        known = self._rows.get(heads)
        if known is None or len(known) < first + rows:
            shape = (first + rows, heads, MODEL.head_dim)
            self._rows[heads] = torch.randn(shape, dtype=torch.bfloat16, device=DEVICE)
        return self._rows[heads][first : first + rows]


noise = Noise()


def usable() -> list[Backend]:
    """fa4 and flash, as far as this machine has them."""
    like = noise(1, MODEL.heads)
    keys = like[:, : MODEL.kv_heads]
    traits = Traits.of(TensorSpec.of(like, keys, keys), [Mask.parse("causal")])
    return [b for b in backends() if b.name in ("fa4", "flash") and not b.refusal(traits)]


class BareCall:
    """A fused kernel call on random rows, without exchange or gathering."""

    def __init__(self, call: PackedCall, backend: Backend) -> None:
        self.call, self.backend = call, backend
        self.queries, self.keys = np.array(call.lengths, np.int64).T
        self.pairs = self.queries * self.keys - self.queries * (self.queries - 1) // 2  # causal

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        keys = [noise(self.call.num_keys, MODEL.kv_heads, number) for number in (0, 1)]
        return noise(self.call.num_queries, MODEL.heads), keys[0], keys[1]

    def measure(self, *ways: str) -> dict[str, float]:
        """Seconds of one pass each way, after a warm-up."""
        q, k, v = self.inputs()
        saved = Saved(q, k, v, *self.backend.forward(q, k, v, self.call, SCALE))
        grad = noise(len(q), MODEL.heads, 1)
        work = {
            "forward": lambda: self.backend.forward(q, k, v, self.call, SCALE),
            "backward": lambda: self.backend.backward(grad, saved, self.call, SCALE),
        }
        return seconds({way: work[way] for way in ways or WAYS}, rounds=1)


def served(plan: Plan, rank: int, backend: Backend) -> tuple[dict[str, float], dict[str, int]]:
    """Seconds and pairs of a server's fused calls, forward and backward."""
    taken, counted = dict.fromkeys(WAYS, 0.0), dict.fromkeys(WAYS, 0)
    shared = plan.backward is plan.forward
    for ways in (WAYS,) if shared else (("forward",), ("backward",)):
        layout = Layout.of(plan, rank, backward=ways == ("backward",))
        for bare in bare_calls(layout, backend):
            for way, spent in bare.measure(*ways).items():
                taken[way] += spent
                counted[way] += int(bare.pairs.sum())
    return taken, counted


def bare_calls(layout: Layout, backend: Backend) -> Iterator[BareCall]:
    for call in (*layout.local, *layout.remote):
        packed = PackedCall.of(call.mask, call.q_offsets, call.kv_offsets, DEVICE)
        yield BareCall(packed, backend)


def call_of(queries: Sequence[int], keys: Sequence[int], mask: str = "causal") -> PackedCall:
    offsets = (np.concatenate([[0], np.cumsum(sizes)]) for sizes in (queries, keys))
    return PackedCall.of(Mask.parse(mask), *offsets, DEVICE)


def real_plan(lengths: str, ranks: int, placement: str = "given", **options: Any) -> Plan:
    documents = distribution(lengths, CONTEXT).batch(ranks * CONTEXT, seed=0)
    policy = policy_of("distca", placement)
    return place_and_plan(Placement.in_order(documents, ranks), policy, model=MODEL, **options)


def spread(count: int, of: int) -> list[int]:
    """Some of so many ranks, evenly."""
    return sorted({round(i * (of - 1) / max(count - 1, 1)) for i in range(min(count, of))})


# -- parts -------------------------------------------------------------------------------------


def exactness() -> Iterator[Record]:
    """Each backend against plain maths in float64: relative errors."""
    queries = [4096, 1000, 1, 128, 500, 1024]
    keys = [4096, 1000, 1, 8192, 6000, 3000]
    for mask in ("causal", "full", "window:1000"):
        call = call_of(queries, keys, mask)
        q, k, v = noise(sum(queries), 32), noise(sum(keys), 8, 0), noise(sum(keys), 8, 1)
        grad = noise(sum(queries), 32, 1)
        oracle = Reference()
        wide = [t.double() for t in (q, k, v, grad)]
        exact = oracle.forward(*wide[:3], call, SCALE)
        right = oracle.backward(wide[3], Saved(*wide[:3], *exact), call, SCALE)
        for backend in backends():
            traits = Traits.of(TensorSpec.of(q, k, v), [Mask.parse(mask)])
            if refusal := backend.refusal(traits):
                yield {"backend": backend.name, "mask": mask, "refused": refusal}
                continue
            found = backend.forward(q, k, v, call, SCALE)
            grads = backend.backward(grad, Saved(q, k, v, *found), call, SCALE)
            errors = [
                float((a.double() - b).norm() / b.norm())
                for a, b in zip((found.out, *grads), (exact.out, *right), strict=True)
            ]
            names = ("out", "dq", "dk", "dv")
            yield {"backend": backend.name, "mask": mask, **dict(zip(names, errors, strict=True))}
        torch.cuda.empty_cache()


def fused() -> Iterator[Record]:
    """Fused calls of sampled servers against the same documents uncut, per query-key pair."""
    for lengths in ("pretrain", "prolong"):
        for ranks in (8, 64, 256):
            plans = {way: real_plan(lengths, ranks, placement=way) for way in ("given", "balanced")}
            for backend in usable():
                whole = uncut(plans["given"], backend, 8 / ranks)
                for placement, plan in plans.items():
                    case = {"lengths": lengths, "servers": ranks, "placement": placement}
                    yield {**case, "backend": backend.name, **compare(plan, backend, whole)}


def compare(plan: Plan, backend: Backend, whole: dict[str, float]) -> Record:
    """``whole``: seconds per pair of whole documents."""
    measured = [served(plan, rank, backend) for rank in spread(8, plan.devices.num_ranks)]
    cut = {
        way: sum(taken[way] for taken, _ in measured) / sum(count[way] for _, count in measured)
        for way in WAYS
    }
    flops = MODEL.flops_per_pair
    return {
        "sampled": len(measured),
        "ratio": sum(cut.values()) / sum(whole.values()),
        "forward_ratio": cut["forward"] / whole["forward"],
        "backward_ratio": cut["backward"] / whole["backward"],
        "forward_tflops": flops / cut["forward"] / 1e12,
        "backward_tflops": 2.5 * flops / cut["backward"] / 1e12,
    }


def uncut(plan: Plan, backend: Backend, share: float) -> dict[str, float]:
    """Seconds per pair of whole documents: every so many by length, in calls of 128K tokens."""
    step = max(round(1 / share), 1)
    chosen = np.sort(plan.placement.lengths)[step // 2 :: step]
    bins: list[list[int]] = [[]]
    for length in np.random.default_rng(0).permutation(chosen).tolist():
        if bins[-1] and sum(bins[-1]) + length > CONTEXT:
            bins.append([])
        bins[-1].append(length)
    calls = [BareCall(call_of(documents, documents), backend) for documents in bins]
    times = [call.measure() for call in calls]
    count = sum(int(call.pairs.sum()) for call in calls)
    return {way: sum(taken[way] for taken in times) / count for way in WAYS}


def overhead() -> Iterator[Record]:
    """CoreAttention on one rank of NCCL against the bare kernel; 64K tokens."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    tokens = CONTEXT // 2
    cases = {
        "one of 64K": [tokens],
        "pretrain": distribution("pretrain", tokens).batch(tokens, seed=1).tolist(),
        "prolong": distribution("prolong", tokens).batch(tokens, seed=1).tolist(),
        "64 of 1K": [1024] * 64,
    }
    for name, documents in cases.items():
        plan = make_plan([documents], model=MODEL)
        for backend in usable():
            attention = CoreAttention(backend=backend.name)
            q, k, v, grad = (
                noise(tokens, heads, number).detach().clone()
                for heads, number in ((32, 0), (8, 0), (8, 1), (32, 1))
            )
            call = call_of(documents, documents)
            leaves = [t.requires_grad_() for t in (q, k, v)]

            def whole(attention=attention, leaves=leaves, plan=plan, grad=grad) -> None:  # type: ignore[no-untyped-def]
                out = attention(*leaves, plan)
                torch.autograd.grad(out, leaves, grad)

            def bare(backend=backend, qkv=(q, k, v), call=call, grad=grad) -> None:  # type: ignore[no-untyped-def]
                attended = backend.forward(*qkv, call, SCALE)
                backend.backward(grad, Saved(*qkv, *attended), call, SCALE)

            times = seconds({"bare": bare, "whole": whole}, rounds=15)
            yield {
                "documents": name,
                "backend": backend.name,
                "bare_ms": times["bare"] * 1e3,
                "whole_ms": times["whole"] * 1e3,
                "ratio": times["whole"] / times["bare"],
            }
    dist.destroy_process_group()


def replay() -> Iterator[Record]:
    """Ranks of a 64-server plan one by one, with a cost model fitted to half of the sample."""
    ranks, sampled = 64, spread(32, 64)
    for lengths in ("pretrain", "prolong"):
        for backend in usable():
            first = real_plan(lengths, ranks)
            fitted = fit(first, backend, sampled[::2])
            for cost in (analytic_cost(MODEL), fitted):
                plan = real_plan(lengths, ranks, cost=cost)
                yield {
                    "lengths": lengths,
                    "backend": backend.name,
                    "cost": cost.name,
                    "planned": plan.imbalance,
                    **replay_ranks(plan, backend, sampled[1::2]),
                }


def fit(plan: Plan, backend: Backend, servers: Sequence[int]) -> CostModel:
    timed = []
    for rank in servers:
        for bare in bare_calls(Layout.of(plan, rank), backend):
            times = bare.measure()
            timed.append(
                TimedCall(bare.queries, bare.keys, bare.pairs, times["forward"], times["backward"])
            )
    return calibrated(MODEL, timed, "fitted")


def replay_ranks(plan: Plan, backend: Backend, servers: Sequence[int]) -> Record:
    """Whole passes, gathering included, with an exchange that takes no time."""
    times: dict[str, list[float]] = {"forward": [], "backward": [], "kernels": []}
    for rank in servers:
        transport = ThrottledTransport(rank, plan.devices.num_ranks, bytes_per_s=1e18)
        attention = CoreAttention(transport=transport, backend=backend.name)
        tokens = int(plan.placement.tokens[rank])
        q, k, v, grad = (
            noise(tokens, heads, number) for heads, number in ((32, 0), (8, 0), (8, 1), (32, 1))
        )
        prepared = attention.prepare(TensorSpec.of(q, k, v), forward=plan, backward=plan)
        saved = Saved(q, k, v, *ForwardPass(prepared, q, k, v).combine())

        def forward(prepared=prepared, q=q, k=k, v=v) -> None:  # type: ignore[no-untyped-def]
            ForwardPass(prepared, q, k, v).combine()

        def backward(prepared=prepared, grad=grad, saved=saved) -> None:  # type: ignore[no-untyped-def]
            BackwardPass(prepared, grad, saved).combine()

        taken = seconds({"forward": forward, "backward": backward})
        times["forward"].append(taken["forward"])
        times["backward"].append(taken["backward"])
        times["kernels"].append(sum(served(plan, rank, backend)[0].values()))
        del prepared, saved, attention
    total = sum(times["forward"]) + sum(times["backward"])
    return {
        "held_out": len(servers),
        **{f"{way}_worst_over_mean": max(times[way]) / float(np.mean(times[way])) for way in WAYS},
        "forward_ms": float(np.mean(times["forward"])) * 1e3,
        "backward_ms": float(np.mean(times["backward"])) * 1e3,
        "moving_share": 1 - sum(times["kernels"]) / total,
    }


# -- the report --------------------------------------------------------------------------------

PARTS: dict[str, tuple[Callable[[], Iterator[Record]], str]] = {
    "exactness": (exactness, "Relative error against plain maths in float64, bfloat16 inputs"),
    "fused": (
        fused,
        "Fused calls of sampled servers: seconds per query-key pair over those of the same"
        " documents uncut",
    ),
    "overhead": (
        overhead,
        "CoreAttention on one rank of NCCL over the bare kernel, forward and backward, 64K tokens",
    ),
    "replay": (
        replay,
        "Ranks of a 64-server plan, one by one, exchange instantaneous; cost fitted on one half of"
        " 32 sampled ranks, measured on the other",
    ),
}


def table(records: Sequence[Record]) -> str:
    columns = list(dict.fromkeys(key for record in records for key in record))
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for record in records:
        cells = [shown(record.get(column, "")) for column in columns]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def shown(value: object) -> str:
    if isinstance(value, float):
        return (
            f"{value:.2e}"
            if abs(value) < 0.02
            else f"{value:.3f}"
            if value < 10
            else f"{value:.1f}"
        )
    return str(value)


def write(results: Record, folder: Path) -> str:
    head = [f"# Attention on a GPU\n\n`python benchmarks/attention.py`, {results['date']},"]
    head.append(f"{results['card']}, torch {results['torch']}, flash-attn-4 {results['fa4']}.\n")
    body = [
        f"## {name.capitalize()}\n\n{title}.\n\n{table(results[name])}\n"
        for name, (_, title) in PARTS.items()
        if name in results
    ]
    text = "\n".join(["\n".join(head), *body])
    (folder / "attention.md").write_text(text)
    (folder / "attention.json").write_text(json.dumps(results, indent=1) + "\n")
    return text


def fa4_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("flash-attn-4")
    except PackageNotFoundError:
        return "not installed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=PARTS, action="append", help="one part; may be repeated")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this needs a CUDA device")
    torch.manual_seed(0)
    known = options.out / "attention.json"
    results = json.loads(known.read_text()) if known.exists() else {}
    results |= {
        "date": str(date.today()),
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "fa4": fa4_version(),
    }
    for name in options.only or PARTS:
        results[name] = []
        for record in PARTS[name][0]():
            results[name].append(record)
            print(name, {k: shown(v) for k, v in record.items()}, flush=True)
            write(results, options.out)  # after each, so that an interruption loses nothing
    print(write(results, options.out))


if __name__ == "__main__":
    main()
