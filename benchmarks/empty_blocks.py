"""Backward calls that are divided by the keys of their tasks, over whole ones.

    python benchmarks/empty_blocks.py     on a GPU, about two minutes

FlashAttention 2 launches as many thread blocks for every task as for the longest one
(`attention/backends/alike.py`). Tasks are those of the busiest rank in steps of four ranks, and of
one long document beside short ones. Writes benchmarks/results/empty_blocks.md and .json.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from distca.attention.backends import alike
from distca.data.lengths import distribution
from distca.measure.bench import Bench
from distca.measure.profiling import device_name
from distca.model.sizes import model_config
from distca.planning.api import place_and_plan
from distca.planning.masks import CAUSAL, Mask
from distca.planning.placement import Placement
from distca.planning.policies import policy_of

RESULTS = Path(__file__).parent / "results"
RANKS, TOKENS, SEEDS = 4, 131072, 2
POLICIES = {
    "packed data parallelism": policy_of("colocated", "given"),
    "per-document-cp": policy_of("per-document-cp", "given"),
    "distca, given": policy_of("distca", "given"),
    "distca, balanced": policy_of("distca", "balanced"),
}
LONG, SHORT = 65536, (64, 512, 2048)  # one document, and those that fill up as many tokens again


def cases(cost: str, model: str) -> Iterator[tuple[str, list[int], list[int]]]:
    """Yields a name, and the queries and keys of tasks."""
    for lengths in ("prolong", "pretrain"):
        for seed in range(SEEDS):
            batch = distribution(lengths, TOKENS).batch(RANKS * TOKENS, seed)
            for name, policy in POLICIES.items():
                plan = place_and_plan(
                    Placement.in_order(batch, RANKS), policy, model=model, cost=cost, cp=RANKS
                )
                tasks = plan.backward
                mine = tasks.server == int(np.argmax(plan.backward_load_ps))
                queries, keys = tasks.queries[mine].tolist(), tasks.keys[mine].tolist()
                yield f"{lengths}, batch {seed}, {name}", queries, keys
    for short in SHORT:
        documents = [short] * (LONG // short // 2)
        documents = [*documents, LONG, *documents]
        yield f"{LONG:,} tokens beside as many of {short}", documents, documents


def rows_of(bench: Bench, cost: str, model: str) -> list[dict[str, Any]]:
    found = []
    for name, queries, keys in cases(cost, model):
        whole, divided = [], []
        for _ in range(2):  # in turns
            with patch.object(alike, "WORTH_A_CALL", 1 << 62):
                whole.append(bench.attention(queries, keys, Mask(CAUSAL)).backward)
            divided.append(bench.attention(queries, keys, Mask(CAUSAL)).backward)
        found.append(
            {
                "tasks": name,
                "number": len(keys),
                "most keys": max(keys),
                "calls": len(alike.alike(np.array(keys))),
                "one call, ms": 1e3 * min(whole),
                "divided, ms": 1e3 * min(divided),
                "divided / one": min(divided) / min(whole),
            }
        )
    return found


def report(about: str, rows: list[dict[str, Any]]) -> str:
    names = list(rows[0])
    lines = ["# Backward calls divided by the keys of their tasks", "", about, ""]
    lines += [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
    for row in rows:
        cells = (
            f"{one:.2f}" if isinstance(one, float) else f"{one:,}" if isinstance(one, int) else one
            for one in row.values()
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama3.2-1b", help="whose heads are measured")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this machine has no GPU, whose kernels are measured")
    device = torch.device("cuda")
    rows = rows_of(Bench(model_config(options.model), device, "flash"), "h200-flash", options.model)
    about = (
        f"`python benchmarks/empty_blocks.py --model {options.model}`, {date.today()},"
        f" {device_name(device)}, torch {torch.__version__}, backend flash."
    )
    text = report(about, rows)
    print(text)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "empty_blocks.md").write_text(text)
    (options.out / "empty_blocks.json").write_text(
        json.dumps({"about": about, "rows": rows}, indent=1)
    )


if __name__ == "__main__":
    main()
