"""An 8B-shaped model on one GPU: steps compared with the bare kernel, and what ping-pong hides.

    python benchmarks/train_gpu.py                 both parts, about ten minutes on an H200
    python benchmarks/train_gpu.py --only overlap  one part; results of the other are kept

*steps*: Llama-3-8B with as many layers as fit, 64K tokens, bfloat16, AdamW, seams recomputed. One
variant uses ``CoreAttention``, as the trainer does; the other calls flash-attn-4's own
differentiable function with the documents' offsets. Everything else is the same object. Steps of
the two alternate; device events; medians.

*overlap*: ranks of a 64-rank plan, one by one, documents up to 32K, 4 layers, through an exchange
that moves the true number of bytes at the bandwidth of a link. ``exposed`` is the time that the
compute stream waited for peers.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from distca.data.documents import Batch, Document
from distca.data.lengths import distribution
from distca.measure.replay import Replay, typical
from distca.model.config import ModelConfig
from distca.model.initialize import initialize
from distca.model.llama import Arriving, Dispatch, Llama, on_meta, plainly
from distca.model.sizes import model_config
from distca.pipeline.memory import GIB, estimate
from distca.pipeline.mesh import MeshShape
from distca.pipeline.step_planner import StepPlanner
from distca.planning.options import PlanOptions
from distca.planning.policies import policy_of
from distca.runtime.batches import Step
from distca.runtime.mesh import RankContext, join_mesh
from distca.runtime.parallelize import Precision, parallelize
from distca.runtime.step import StepRunner
from distca.train.config import TrainSection
from distca.train.flops import peak_flops, step_flops
from distca.train.memory import available_bytes
from distca.train.optimizer import adamw

DEVICE = torch.device("cuda", 0)
TOKENS = 65536
MODEL = model_config("llama3-8b")
BF16 = Precision(torch.bfloat16)
RESULTS = Path(__file__).parent / "results"
Record = dict[str, Any]


def measure(sides: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median device seconds of each side, in turns, after a warm-up of all."""
    times: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(rounds + 1):
        for side, run in sides.items():
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            stop.record()
            stop.synchronize()
            if number:
                times[side].append(start.elapsed_time(stop) / 1e3)
    return {side: median(taken) for side, taken in times.items()}


def batch_of(lengths: list[int]) -> Batch:
    rng = np.random.default_rng(0)
    return Batch(tuple(Document.from_tokens(rng.integers(0, 128000, n)) for n in lengths))


def planner(
    config: ModelConfig, parallel: MeshShape, placement: str = "given", ping_pong: bool = False
) -> StepPlanner:
    masks = tuple(config.mask_of(layer) for layer in range(config.layers))
    options, policy = PlanOptions(model=config.shape), policy_of("distca", placement)
    return StepPlanner(parallel, masks, options, policy, ping_pong=ping_pong)


def built(config: ModelConfig, context: RankContext, *, compile: bool = False) -> Llama:
    model = on_meta(config)
    parallelize(model, context, BF16, compile=compile)
    initialize(model, seed=0, device=DEVICE)
    return model


# -- whole steps -------------------------------------------------------------------------------


def steps(rounds: int, only_layers: int) -> Iterator[Record]:
    context = join_mesh(MeshShape(), DEVICE)
    config = replace(MODEL, layers=only_layers or layers_that_fit())
    cases = {
        "one of 64K": [TOKENS],
        "pretrain": distribution("pretrain", TOKENS).batch(TOKENS, seed=1).tolist(),
    }
    for compiled in (False, True):
        model = built(config, context, compile=compiled)
        optimizer = adamw(model, TrainSection())
        for name, lengths in cases.items():
            case = {"documents": name, "layers": config.layers, "compiled": compiled}
            yield case | compare(model, optimizer, context, lengths, rounds)
        del model, optimizer
        torch.cuda.empty_cache()


def compare(
    model: Llama,
    optimizer: torch.optim.Optimizer,
    context: RankContext,
    lengths: list[int],
    rounds: int,
) -> Record:
    runner = StepRunner.of(context, recompute=True, dtype=BF16.compute)
    dispatch = without_distca(lengths)
    step = Step.of(planner(model.config, MeshShape()), batch_of(lengths))
    ((half,),) = step.plan.micro_batches
    losses: dict[str, Tensor] = {}

    def distca() -> None:
        losses["distca"] = runner.train(model, step)
        change(optimizer)

    def bare() -> None:
        rows = step.rows(half, 0)
        tokens, positions, labels = (t.to(DEVICE, non_blocking=True) for t in rows[:3])
        (leaving,) = model([Arriving(tokens, positions, labels=labels)], dispatch, recompute=True)
        mean = leaving.loss.total / step.batch.num_targets
        mean.backward()
        losses["bare"] = mean.detach()
        change(optimizer)

    torch.cuda.reset_peak_memory_stats()
    times = measure({"bare": bare, "distca": distca}, rounds)
    flops = step_flops(model.config, np.array(lengths)) / (peak_flops(DEVICE) or float("nan"))
    return {
        "bare tokens/s": TOKENS / times["bare"],
        "distca tokens/s": TOKENS / times["distca"],
        "ratio": times["bare"] / times["distca"],
        "bare MFU": flops / times["bare"],
        "distca MFU": flops / times["distca"],
        "peak GiB": torch.cuda.max_memory_allocated() / GIB,
        "estimated GiB": estimated(model.config) / GIB,
        "last losses": [float(losses[side]) for side in ("bare", "distca")],
    }


def change(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


def without_distca(lengths: list[int]) -> Dispatch:
    """Seam, kernel, seam, kernel, without plan and exchange."""
    from flash_attn.cute.interface import flash_attn_varlen_func

    offsets = torch.tensor([0, *np.cumsum(lengths).tolist()], dtype=torch.int32, device=DEVICE)
    tasks = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
    tasks |= {"max_seqlen_q": max(lengths), "max_seqlen_k": max(lengths)}

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = flash_attn_varlen_func(q, k, v, **tasks, causal=True)
        return out[0] if isinstance(out, tuple) else out

    return plainly(attend)


def estimated(config: ModelConfig) -> int:
    return estimate(config.shape, MeshShape(), TOKENS, recompute=True).total


def layers_that_fit() -> int:
    """By the estimate that a training run prints, and refuses by."""
    room = available_bytes(DEVICE, 1)
    return max(n for n in range(1, 33) if estimated(replace(MODEL, layers=n)) <= room)


# -- what is hidden ----------------------------------------------------------------------------

RANKS = 64
LINKS = {"50 GB/s": 50e9, "25 GB/s": 25e9}


def overlap(rounds: int, only_layers: int) -> Iterator[Record]:
    config = replace(MODEL, layers=only_layers or 4)
    context = join_mesh(MeshShape(), DEVICE)
    model = built(config, context)
    # Of half the tokens of a rank: each half of a step must hold its longest document.
    lengths = distribution("pretrain", TOKENS // 2).batch(RANKS * TOKENS, seed=1)
    parallel = MeshShape(dp=RANKS)
    for placement in ("given", "balanced"):
        halved = {
            way: planner(config, parallel, placement=placement, ping_pong=way).plan(lengths)
            for way in (False, True)
        }
        traffic = halved[False].slots[0][0][0].traffic
        load = np.maximum(traffic.send, traffic.recv)
        order = np.argsort(load)
        for what, rank in (("median", int(order[RANKS // 2])), ("busiest", int(order[-1]))):
            sides = {"free, off": (1e18, False), "free, ping-pong": (1e18, True)}
            for link, bandwidth in LINKS.items():
                sides |= {f"{link}, off": (bandwidth, False)}
                sides |= {f"{link}, ping-pong": (bandwidth, True)}
            runs = {
                side: Replay(
                    model, halved[ping_pong], rank, bytes_per_s=bandwidth, dtype=BF16.compute
                )
                for side, (bandwidth, ping_pong) in sides.items()
            }
            turns = [{side: run() for side, run in runs.items()} for _ in range(rounds + 1)]
            taken = {side: typical([turn[side] for turn in turns[1:]]) for side in sides}
            for side, seconds in taken.items():
                link, way = side.split(", ")
                yield {
                    "placement": placement,
                    "rank": f"{what} ({rank})",
                    "link": link,
                    "ping-pong": way == "ping-pong",
                    "MB a layer": float(load[rank]) / 1e6,
                    "step ms": seconds.step_s * 1e3,
                    "over free": seconds.step_s / taken[f"free, {way}"].step_s,
                    "exposed ms": seconds.exposed_s * 1e3,
                }


# -- the report --------------------------------------------------------------------------------

PARTS = {
    "steps": (steps, "Whole steps: CoreAttention in the model against the bare fa4 kernel"),
    "overlap": (overlap, "Ranks of a 64-rank plan, forward and backward of 4 layers"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=list(PARTS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=0, help="fewer, to try the script out")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    path = options.out / "train_gpu.json"
    results: Record = json.loads(path.read_text()) if path.exists() else {}
    results |= {
        "date": str(date.today()),
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }
    for name, (part, _) in PARTS.items():
        if options.only in (None, name):
            results[name] = list(part(options.rounds, options.layers))
            path.write_text(json.dumps(results, indent=1) + "\n")
    text = report(results)
    print(text)
    options.out.joinpath("train_gpu.md").write_text(text)
    dist.destroy_process_group()


def report(results: Record) -> str:
    lines = [
        "# Training on a GPU",
        "",
        f"`python benchmarks/train_gpu.py`, {results['date']}, {results['card']},"
        f" torch {results['torch']}, flash-attn-4.",
    ]
    for name, (_, title) in PARTS.items():
        if records := results.get(name):
            lines += ["", f"## {title}", "", "| " + " | ".join(records[0]) + " |"]
            lines += ["|" + "---|" * len(records[0])]
            lines += ["| " + " | ".join(map(_shown, row.values())) + " |" for row in records]
    return "\n".join(lines) + "\n"


def _shown(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(f"{x:.5f}" for x in value)
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
    return str(value)


if __name__ == "__main__":
    main()
