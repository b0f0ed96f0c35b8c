"""transformers on one GPU: what attention through distca costs where nothing can be shared.

    python benchmarks/transformers_gpu.py        about four minutes on an H200

Four layers of Llama-3-8B in bfloat16 on packed documents, forward and backward, each side with the
same weights and batch. Sides take turns; device events; medians. Balance is not measured here: one
rank has nobody to share with. ``sdpa`` masks other documents, ``flex_attention`` skips blocks of
them, distca attends document by document, with torch's own flash kernels or with flash-attn-4 where
that is installed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from datetime import date
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch

from distca.data.lengths import distribution
from distca.integrations.transformers import register

OURS = {"distca": "flash", "distca, fa4": "fa4"}
SIDES = ("sdpa", "flex_attention", *(list(OURS) if find_spec("flash_attn") else list(OURS)[:1]))
BATCHES = {
    "pretrain, up to 32K": ("pretrain", 32768),
    "one document of 32K": ("fixed:32768", 32768),
}
MODEL = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "use_cache": False,
}
ROUNDS, WARM_UP = 10, 3
RESULTS = Path(__file__).parent / "results"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    record: dict[str, Any] = {
        "date": str(date.today()),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
    }
    record["batches"] = {name: compared(*batch) for name, batch in BATCHES.items()}
    text = report(record)
    print(text)
    options.out.joinpath("transformers_gpu.md").write_text(text)
    options.out.joinpath("transformers_gpu.json").write_text(json.dumps(record, indent=1) + "\n")


def compared(lengths: str, num_tokens: int) -> dict[str, Any]:
    """Seconds of a step by side, and the losses."""
    documents = distribution(lengths, num_tokens).batch(num_tokens, seed=0).tolist()
    batch = packed(documents)
    steps = {side: step_of(side, batch) for side in SIDES}
    losses = {side: step() for side, step in steps.items()}
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    for number in range(WARM_UP + ROUNDS):
        for side, step in steps.items():
            took = timed(step)
            if number >= WARM_UP:
                seconds[side].append(took)
    times = {side: median(took) for side, took in seconds.items()}
    return {"documents": len(documents), "tokens": num_tokens, "seconds": times, "losses": losses}


def packed(documents: list[int]) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    row = torch.randint(MODEL["vocab_size"], (1, sum(documents)), generator=draw)
    positions = torch.cat([torch.arange(length) for length in documents])[None]
    return {"input_ids": row.cuda(), "labels": row.cuda(), "position_ids": positions.cuda()}


def step_of(side: str, batch: dict[str, torch.Tensor]) -> Callable[[], float]:
    from transformers import AutoModelForCausalLM, LlamaConfig

    if side in OURS:
        register(side, backend=OURS[side])
    torch.manual_seed(0)
    config = LlamaConfig(**MODEL)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=side)
    model.to("cuda", torch.bfloat16).train()

    def step() -> float:
        model.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        return float(loss.detach())

    return step


def timed(step: Callable[[], float]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def report(record: dict[str, Any]) -> str:
    lines = [
        "# transformers on one GPU",
        "",
        f"`python benchmarks/transformers_gpu.py`, {record['date']}, {record['gpu']}, torch"
        f" {record['torch']}, transformers {record['transformers']}.",
        "Four layers of Llama-3-8B in bfloat16, forward and backward, medians of"
        f" {ROUNDS} in turns. distca attends with torch's",
        "flash kernels, or with flash-attn-4 where it is said.",
        "",
        "| documents | side | ms a step | of sdpa's time | loss |",
        "|---|---|---|---|---|",
    ]
    for name, one in record["batches"].items():
        for side, seconds in one["seconds"].items():
            share = seconds / one["seconds"]["sdpa"]
            lines.append(
                f"| {name} ({one['documents']}) | {side} | {1e3 * seconds:.1f} | {share:.2f}"
                f" | {one['losses'][side]:.4f} |"
            )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
