"""Backward calls that are divided by the keys of their tasks, over whole ones.

    python benchmarks/empty_blocks.py     on a GPU, about two minutes

FlashAttention 2 launches as many thread blocks for every task as for the longest one
(`attention/backends/alike.py`). Tasks are those of the busiest rank in steps of four ranks, and of
one long document beside short ones. Writes benchmarks/results/empty_blocks.md and .json.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
from gpu_table import gpu_of, gpu_parser, write

from distca.attention.backends import alike
from distca.data.lengths import distribution
from distca.measure.bench import Bench
from distca.model.sizes import model_config
from distca.planning.api import place_and_plan
from distca.planning.masks import CAUSAL, Mask
from distca.planning.placement import Placement
from distca.planning.policies import policy_of

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


def main() -> None:
    parser = gpu_parser(__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama3.2-1b", help="whose heads are measured")
    options = parser.parse_args()
    bench = Bench(model_config(options.model), gpu_of(parser), "flash")
    write(
        options.out,
        "empty_blocks",
        "Backward calls divided by the keys of their tasks",
        f"python benchmarks/empty_blocks.py --model {options.model}",
        rows_of(bench, "h200-flash", options.model),
    )


if __name__ == "__main__":
    main()
