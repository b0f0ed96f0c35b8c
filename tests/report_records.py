"""Records of runs as ``distca train`` writes them, for tests of pages."""

import json
from pathlib import Path
from typing import Any


def steps(number: int, ranks: int = 3, slow: int = 0) -> list[dict[str, Any]]:
    """Records of steps in which one rank needs twice as long for its attention as the others."""
    return [
        {
            "step": step,
            "lr": 1e-3,
            "skipped": False,
            "loss": 5.0 / (1 + step),
            "grad_norm": 1.0,
            "seconds": 2.0,
            "tokens": 1024,
            "tokens_per_s": 512.0,
            "tflops_per_rank": 0.5,
            "mfu": None,
            "imbalance_before": 2.5,
            "imbalance_planned": 1.02,
            "imbalance_measured": 1.5,
            "speeds": [0.5 if rank == slow else 1.0 for rank in range(ranks)],
            "bytes": 10_000,
            "exposed_s": 0.25,
            "plan_s": 0.01,
            "planning_waited_s": 0.001,
            "memory_bytes": 3 << 30,
            "stopped": False,
            "ranks": {
                "attention_s": [0.2 if rank == slow else 0.1 for rank in range(ranks)],
                "exposed_s": [0.0 if rank == slow else 0.1 for rank in range(ranks)],
                "waited_s": [0.001] * ranks,
            },
        }
        | ({"eval_loss": 4.0, "eval_loss_below_256": 4.5} if step % 4 == 3 else {})
        for step in range(number)
    ]


def ticks(step: int = 3, stages: int = 2, servers: int = 1) -> dict[str, Any]:
    """The ticks of a step of a pipeline, in which the last rank computes most of the attention."""
    cells = [["F0", "."], ["F1", "F0"], [".", "B0"], [".", "F1"], ["B0", "B1"], ["B1", "."]]
    ranks = stages + servers

    def table(first: float) -> list[list[float]]:
        return [[first * (1 + tick) * (1 + rank) for rank in range(ranks)] for tick in range(6)]

    return {
        "step": step,
        "seconds": 2.0,
        "cells": cells,
        "phases": [max(row)[0] for row in cells],
        "workers_per_stage": 1,
        "planned_s": table(0.001),
        "tick_s": table(0.004),
        "attention_s": table(0.002),
        "exposed_s": table(0.0005),
    }


def write_run(folder: Path, number: int, **options: Any) -> Path:
    """Writes the folder of a run with a fault, a recovery and a lost server."""
    folder.mkdir(parents=True)
    records = steps(number, **options)
    if number > 6:
        records[6]["lost_servers"] = [{"rank": 2, "how": "its process ended", "servers": 0}]
        for record in records[6:]:
            for values in record["ranks"].values():
                del values[2:]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    faults = [
        {"fault": "kill server 0 step 6", "rank": 2, "step": 6, "time": 1.0},
        {"recovery": 1, "step": 6, "time": 2.0},
    ]
    (folder / "faults.jsonl").write_text("".join(json.dumps(one) + "\n" for one in faults))
    (folder / "ticks.json").write_text(json.dumps({"newest": ticks(3), "slowest": ticks(1)}))
    config = {
        "model": {"name": "debug"},
        "data": {"context": 1024},
        "parallel": {"tp": 1, "servers": 1, "policy": "distca", "placement": "given"},
        "train": {"steps": 12},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder
