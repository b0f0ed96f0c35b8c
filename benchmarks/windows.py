"""Measured seconds of calls under sliding windows, over those that cost models predict.

    python benchmarks/windows.py --backend flash     on a GPU, about half a minute

A profile holds causal tasks alone; what a task under a window takes is derived from them
(`planning/costs/table.py`). Writes benchmarks/results/windows_BACKEND.md and .json.
"""

from __future__ import annotations

from typing import Any

from gpu_table import gpu_of, gpu_parser, write

from distca.measure.bench import Bench
from distca.model.sizes import model_config
from distca.planning.costs.base import PS
from distca.planning.costs.choice import cost_model
from distca.planning.masks import Mask, pairs
from distca.planning.spans import as_ints

COSTS = {"fa4": "h200", "flash": "h200-flash"}
WINDOWS = (128, 512, 4096)
# (queries, keys) of the tasks of a call: documents, and shards with the keys before them.
DOCUMENTS = tuple((length, length) for length in (256, 1024, 4096, 16384, 65536, 262144))
SHARDS = (128, 1024, 16384)


def rows_of(bench: Bench, costs: list[str]) -> list[dict[str, Any]]:
    found = []
    for window in WINDOWS:
        for queries, keys in (*DOCUMENTS, *((n, n + window - 1) for n in SHARDS)):
            tasks = bench.scope.tasks(queries, keys)
            taken = bench.attention([queries] * tasks, [keys] * tasks, Mask(window))
            row: dict[str, Any] = {"window": window, "queries": queries, "keys": keys}
            row |= {"tasks": tasks, "forward_s": taken.forward, "backward_s": taken.backward}
            seen = pairs(
                as_ints([keys - queries]), as_ints([keys]), as_ints([keys]), as_ints([window])
            )
            for name in costs:
                cost = cost_model(name, bench.model.shape)
                for way, seconds in (("forward", taken.forward), ("backward", taken.backward)):
                    ps = cost.of(backward=way == "backward").ps(
                        as_ints([queries]), as_ints([keys]), seen
                    )
                    row[f"{name} {way}"] = seconds / (tasks * float(ps[0]) / PS)
            found.append(row)
    return found


def main() -> None:
    parser = gpu_parser(__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=COSTS, default="flash")
    parser.add_argument("--model", default="llama3-8b", help="whose heads are measured")
    options = parser.parse_args()
    bench = Bench(model_config(options.model), gpu_of(parser), options.backend)
    rows = rows_of(bench, [COSTS[options.backend], "analytic"])
    write(
        options.out,
        f"windows_{options.backend}",
        "Calls under sliding windows",
        f"python benchmarks/windows.py --backend {options.backend} --model {options.model}",
        rows,
        "Columns with the name of a cost are measured over predicted seconds.",
    )


if __name__ == "__main__":
    main()
