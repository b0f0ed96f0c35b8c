"""Completions of shared prompts: packed with the prompt once, against one row for each completion.

    python benchmarks/shared_prefixes.py --cpu                      2 gloo ranks, small sizes
    python benchmarks/shared_prefixes.py                            1 GPU, prompts of 1K to 32K
    python benchmarks/shared_prefixes.py --ranks 4 --share-gpu      4 NCCL ranks on one GPU

Both sides are a Llama of transformers with ``attn_implementation="distca"``, and their steps
(forward and backward) alternate. The lengths of completions are uneven: lognormal with the given
mean, sigma 0.8. Every step has new tokens, and the lengths in another order, so that each batch has
plans of its own; ``plan_ahead`` makes them in the background, one batch ahead, unless
``--no-ahead`` is given. On a GPU, the model has fewer than ``--layers`` layers where the rows would
not fit. The *FLOPs ratio* is what sharing would give if every FLOP took the same time, over the
matrix products of the model and its attention; the goal is 0.9 of it.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import date
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from distca.integrations.transformers import collate_shared, register
from distca.planning.masks import document_pairs
from distca.runtime import launch, launched
from distca.runtime.shared_gpu import share_gpu
from distca.runtime.world import join_world

RESULTS = Path(__file__).parent / "results"
LOGS = Path("runs/shared_prefixes/logs")
GROUPS = (8, 16)  # completions of a prompt
CPU_SIZES = ((512, 64), (512, 256), (1024, 64))  # tokens of a prompt, mean tokens of a completion
GPU_SIZES = ((1024, 512), (4096, 512), (4096, 2048), (16384, 2048), (32768, 2048), (32768, 8192))
# What separate rows may take on an H200, and bytes of a token: in each layer, and besides.
GPU_BYTES, LAYER_BYTES, OTHER_BYTES = 120 << 30, 115_000, 65_000
WARM_UP = 1
Row = dict[str, list[int]]


class Sizes(NamedTuple):
    prompts: int  # of a rank
    completions: int  # of a prompt
    prompt: int
    completion: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=0, help="2 with --cpu, else 1")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--layers", type=int, default=0, help="at most; 4 with --cpu, else 8")
    parser.add_argument("--prompts", type=int, default=1, help="of each rank")
    parser.add_argument("--no-ahead", action="store_true", help="plan in the step itself")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--share-gpu", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.ranks = options.ranks or (2 if options.cpu else 1)
    options.layers = options.layers or (4 if options.cpu else 8)
    if launched.is_rank():
        with launched.reporting():
            run_rank(options)
            dist.destroy_process_group()
        return
    with share_gpu(options.ranks, LOGS / "mps") if options.share_gpu else nullcontext() as gpu:
        launch.launch([sys.executable, *sys.argv], options.ranks, LOGS, gpu)


def run_rank(options: argparse.Namespace) -> None:
    if options.cpu:
        torch.set_num_threads(1)
    device = join_world()
    attention = register(timeout_s=300.0)
    ahead = attention.plan_ahead if not options.no_ahead else iter
    model, rows = None, []
    for prompt, completion in CPU_SIZES if options.cpu else GPU_SIZES:
        for group in GROUPS:
            sizes = Sizes(options.prompts, group, prompt, completion)
            layers = layers_of(sizes, options, device)
            if model is None or model.config.num_hidden_layers != layers:
                model = None  # the memory of the last one is free before the next one is built
                model = model_of(layers, device)
            rows.append(row := measure(model, sizes, options.steps, device, ahead))
            if dist.get_rank() == 0:
                print(row, flush=True)
                write(options, rows, device)  # after every case, so that a killed run keeps those


def layers_of(sizes: Sizes, options: argparse.Namespace, device: torch.device) -> int:
    """Returns how many layers fit into the memory, on average with a tenth to spare."""
    if device.type != "cuda":
        return int(options.layers)
    tokens = sizes.prompts * sizes.completions * (sizes.prompt + sizes.completion) * 1.1
    ranks = options.ranks if options.share_gpu else 1
    fitting = (GPU_BYTES / ranks / tokens - OTHER_BYTES) / LAYER_BYTES
    return max(min(options.layers, int(fitting)), 1)


def model_of(layers: int, device: torch.device) -> Any:
    sizes = {"hidden_size": 256, "intermediate_size": 320, "num_attention_heads": 8}
    if device.type == "cuda":
        sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32}
    heads = sizes["num_attention_heads"]
    config = LlamaConfig(
        **sizes, head_dim=64, num_key_value_heads=heads // 4, vocab_size=4096,
        num_hidden_layers=layers, max_position_embeddings=1 << 17, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    with device:
        model = LlamaForCausalLM(config)
    model.to(torch.bfloat16 if device.type == "cuda" else torch.float32)
    model.set_attn_implementation("distca")
    return model.train()


def rollouts(sizes: Sizes, rank: int, step: int) -> list[Row]:
    """Returns the rows of a step; all steps of a rank have completions of the same lengths."""
    mean = np.log(sizes.completion) - 0.8**2 / 2
    lengths = np.random.default_rng(rank).lognormal(mean, 0.8, (sizes.prompts, sizes.completions))
    rng, rows = np.random.default_rng((rank, step)), []
    for of_prompt in rng.permuted(np.maximum(lengths.astype(int), 1)):
        prompt = rng.integers(0, 4096, sizes.prompt).tolist()
        for length in of_prompt:
            end = rng.integers(0, 4096, length).tolist()
            rows.append({"input_ids": prompt + end, "labels": [-100] * len(prompt) + end})
    return rows


def separate(rows: list[Row]) -> dict[str, Any]:
    """Packs each row as a document of its own."""
    labels = [[-100, *row["labels"][1:]] for row in rows]
    columns = {
        "input_ids": [row["input_ids"] for row in rows],
        "position_ids": [list(range(len(row["input_ids"]))) for row in rows],
        "labels": labels,
    }
    return {name: torch.tensor([[*chain(*column)]]) for name, column in columns.items()}


SIDES: dict[str, Callable[[list[Row]], dict[str, Any]]] = {
    "separate": separate,
    "shared": collate_shared,
}


def measure(
    model: Any, sizes: Sizes, steps: int, device: torch.device, ahead: Callable[[Any], Any]
) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    losses, peaks = dict[str, float](), dict[str, int]()
    of_steps = [rollouts(sizes, dist.get_rank(), step) for step in range(steps + WARM_UP)]
    loaders = [iter(ahead([collate(rows) for rows in of_steps])) for collate in SIDES.values()]
    for step, batches in enumerate(zip(*loaders, strict=True)):
        sides = dict(zip(SIDES, batches, strict=True))
        for side, batch in sides.items():
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            taken, losses[side] = step_of(model, batch, device)
            peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
            peaks[side] = max(peak, peaks.get(side, 0))
            if step >= WARM_UP:
                seconds[side].append(taken)
    rows = of_steps[-1]
    tokens = sum(len(row["input_ids"]) for row in rows)
    flops = {side: flops_of(model.config, batch, rows) for side, batch in sides.items()}
    of_all = torch.tensor([tokens, *flops.values()], dtype=torch.float64)
    dist.all_reduce(of_all)
    ratio = median(seconds["separate"]) / median(seconds["shared"])
    ideal = float(of_all[1] / of_all[2])
    return {
        **sizes._asdict(),
        "layers": model.config.num_hidden_layers,
        "tokens": int(of_all[0]),
        "separate_s": median(seconds["separate"]),
        "shared_s": median(seconds["shared"]),
        "tokens_per_s": float(of_all[0]) / median(seconds["shared"]),
        "ratio": ratio,
        "flops_ratio": ideal,
        "of_flops": ratio / ideal,
        "loss_difference": abs(losses["separate"] - losses["shared"]),
        "separate_gib": peaks["separate"] / (1 << 30),
        "shared_gib": peaks["shared"] / (1 << 30),
    }


def step_of(model: Any, batch: dict[str, Any], device: torch.device) -> tuple[float, float]:
    """Returns the seconds of the slowest rank, and this rank's loss."""
    there = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
    dist.barrier()
    start = time.perf_counter()
    loss = model(**there).loss
    loss.backward()
    if device.type == "cuda":
        torch.cuda.synchronize()
    taken = torch.tensor([time.perf_counter() - start], device=device)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    model.zero_grad()
    return taken.item(), loss.item()


def flops_of(config: Any, batch: dict[str, Any], rows: list[Row]) -> float:
    """Returns the FLOPs of forward and backward: matrix products, and the pairs of attention."""
    hidden, heads, head_dim = config.hidden_size, config.num_attention_heads, config.head_dim
    widths = 2 * heads * head_dim + 2 * config.num_key_value_heads * head_dim
    elements = hidden * (widths + 3 * config.intermediate_size) * config.num_hidden_layers
    linear = 6 * (elements + hidden * config.vocab_size) * batch["input_ids"].numel()
    lengths = np.array([len(row["input_ids"]) for row in rows])
    pairs = document_pairs(lengths, "causal")
    if "distca_documents" in batch:  # queries of a prefix are computed once
        prefixes = [d["prefix"] for d in batch["distca_documents"] if not isinstance(d, int)]
        pairs -= document_pairs(np.array(prefixes, dtype=np.int64), "causal")
    return linear + 14 * pairs * heads * head_dim * config.num_hidden_layers


def write(options: argparse.Namespace, rows: list[dict[str, Any]], device: torch.device) -> None:
    gpu = device.type == "cuda"
    card = torch.cuda.get_device_name() if gpu else f"CPU ({platform.machine()})"
    name = f"shared_prefixes_{'gpu' if gpu else 'cpu'}_{options.ranks}"
    lines = [
        "# Completions of shared prompts\n",
        f"`python benchmarks/shared_prefixes.py {' '.join(sys.argv[1:])}`, {date.today()}, {card},"
        f" {options.ranks} rank(s), torch {torch.__version__}. {options.prompts} prompt(s) for each"
        f" rank; medians of {options.steps} steps a side, in turns, each with a new batch.\n",
        "| layers | completions | prompt | mean completion | tokens of rows | rows, s | shared, s"
        " | ratio | FLOPs ratio | of it | loss difference | rows, GiB | shared, GiB |",
        "|---" * 13 + "|",
    ]
    for r in rows:
        memory = [f"{r[side]:.1f}" if gpu else "-" for side in ("separate_gib", "shared_gib")]
        lines.append(
            f"| {r['layers']} | {r['completions']} | {r['prompt']:,} | {r['completion']:,}"
            f" | {r['tokens']:,} | {r['separate_s']:.3g} | {r['shared_s']:.3g} | {r['ratio']:.2f}"
            f" | {r['flops_ratio']:.2f} | {r['of_flops']:.2f} | {r['loss_difference']:.1e}"
            f" | {memory[0]} | {memory[1]} |"
        )
    text = "\n".join(lines) + "\n"
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{name}.md").write_text(text)
    (options.out / f"{name}.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
