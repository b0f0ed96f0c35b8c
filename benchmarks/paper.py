"""Compares the simulator with the published results (arXiv 2510.18121, its system and baselines).

    python benchmarks/paper.py                 everything, on all cores
    python benchmarks/paper.py --only 3d       one part; results of the others are kept
    python benchmarks/paper.py --batches 2     fewer batches per cell, for a quick try

The published runs used TP 8, 400 Gb/s per GPU and FlashAttention 2, so the cluster is
``h200-flash`` here and, to show the effect of faster kernels, ``h200`` (flash-attn-4). Baselines
use the best of all splits of the workers into dp x cp, as in the published comparison.

*3d*: no pipeline, WLB-LLM's best split and disaggregation. *4d*: with a pipeline, 1F1B and aligned
ticks, each with the best of a few micro-batch counts. *cp*: 34B on 256 GPUs and head-tail context
parallelism, in seconds. *idle*: stragglers at dp 1 to 8. *gather*: the share of context
parallelism's all-gather. *pipeline*: what other schedules could gain.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

from paper_tables import report, write

from distca.pipeline.mesh import MeshShape
from distca.planning.models import model_shape
from distca.sim.cluster import cluster
from distca.sim.scenario import Scenario, Strategy
from distca.sim.simulate import Summary

RESULTS = Path(__file__).parent / "results"
K = 1024
TP = 8
KERNELS = ("h200-flash", "h200")
Record = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """One set of global batches."""

    model: str
    data: str
    context: int
    gpus: int
    sequences: int
    kernel: str = "h200-flash"

    @property
    def scenario(self) -> Scenario:
        machines = replace(cluster(self.kernel), gpus=self.gpus)
        return Scenario(
            model_shape(self.model), machines, self.context * K, self.sequences, self.data
        )

    def workers(self, pp: int = 1) -> int:
        return self.gpus // TP // pp


@dataclass(frozen=True)
class Job:
    """One strategy on one cell's batches."""

    cell: Cell
    strategy: Strategy
    batches: int

    def run(self) -> Record | None:
        """None where the strategy cannot run these batches."""
        began = time.perf_counter()
        scenario = self.cell.scenario
        try:
            found = Summary.of(scenario, self.strategy, scenario.batches(self.batches))
        except ValueError:
            return None
        return {
            "name": self.strategy.name,
            "sizes": self.strategy.sizes,
            "step_s": found.step_s,
            "idle": found.idle,
            "exposed": found.exposed,
            "gb_per_gpu": found.bytes_per_gpu / 1e9,
            "memory_gib": found.memory.total / 2**30,
            "fits": found.fits,
            "took_s": time.perf_counter() - began,
        }


def splits(cell: Cell, policy: str, pp: int = 1, micro_batches: int = 1) -> list[Strategy]:
    """Every dp x cp with at least a sequence for each dp, as published."""
    workers, strategies = cell.workers(pp), []
    cp = 1
    while cp <= workers:
        dp = workers // cp
        if dp * micro_batches <= cell.sequences:
            strategies.append(Strategy(policy, MeshShape(pp, dp, cp, TP), micro_batches))
        cp *= 2
    return strategies


def ours(cell: Cell, pp: int = 1, micro_batches: int = 1) -> list[Strategy]:
    """The published design with our runtime (its planner, 5 %), then what we add to it."""
    parallel = MeshShape(pp, 1, cell.workers(pp), TP)
    return [
        Strategy("greedy", parallel, micro_batches, tolerance=0.05),
        Strategy("distca", parallel, micro_batches),
        Strategy("distca", parallel, micro_batches, placement="balanced"),
    ]


def best(records: Iterable[Record | None]) -> Record | None:
    found = [record for record in records if record is not None and record["fits"]]
    return min(found, key=lambda record: float(record["step_s"]), default=None)


class Pool:
    """Runs jobs on all cores, results in the order of the jobs."""

    def __init__(self, executor: Executor) -> None:
        self._pool = executor

    def run(self, jobs: Sequence[Job]) -> list[Record | None]:
        return list(self._pool.map(Job.run, jobs))

    def by_name(
        self, cell: Cell, strategies: Sequence[Strategy], batches: int
    ) -> dict[str, Record]:
        """The best sizes of each policy."""
        records = self.run([Job(cell, strategy, batches) for strategy in strategies])
        names = dict.fromkeys(record["name"] for record in records if record is not None)
        chosen = {name: best(r for r in records if r and r["name"] == name) for name in names}
        return {name: record for name, record in chosen.items() if record is not None}


# -- 3D and 4D: against WLB-LLM -------------------------------------------------------------------

# Sequences of a global batch at 64, 128 and 256 GPUs (published).
THREE_D = {
    ("llama3-8b", 128): (8, 16, 32),
    ("llama3-8b", 256): (4, 8, 16),
    ("llama3-8b", 512): (2, 4, 8),
    ("llama-34b", 128): (4, 8, 16),
    ("llama-34b", 256): (2, 4, 8),
    ("llama-34b", 512): (2, 4, 8),
}
DATA = ("pretrain", "prolong")

# The same with a pipeline: 64, 128 and 256 GPUs for 8B; 128, 256 and 512 for 34B.
FOUR_D = {
    ("llama3-8b", 128): (32, 64, 128),
    ("llama3-8b", 256): (16, 32, 32),
    ("llama3-8b", 512): (8, 8, 16),
    ("llama-34b", 128): (32, 64, 128),
    ("llama-34b", 256): (16, 32, 32),
    ("llama-34b", 384): (8, 8, 16),
}


def three_d(pool: Pool, batches: int) -> Iterator[Record]:
    for (model, context), sequences in THREE_D.items():
        for data in DATA:
            for gpus, count in zip((64, 128, 256), sequences, strict=True):
                for kernel in KERNELS:
                    cell = Cell(model, data, context, gpus, count, kernel)
                    strategies = [*splits(cell, "wlb"), *splits(cell, "head-tail-cp"), *ours(cell)]
                    yield row(cell, pool.by_name(cell, strategies, batches))


def four_d(pool: Pool, batches: int) -> Iterator[Record]:
    """Two stages, as nearly all published winners; micro-batches from 4 to 16."""
    for (model, context), sequences in FOUR_D.items():
        machines = (64, 128, 256) if model == "llama3-8b" else (128, 256, 512)
        for data in DATA:
            for gpus, count in zip(machines, sequences, strict=True):
                cell = Cell(model, data, context, gpus, count)
                strategies = [
                    strategy
                    for micro_batches in (4, 8, 16)
                    for strategy in splits(cell, "wlb", 2, micro_batches)
                ]
                strategies += [
                    strategy for m in (4, 8) if 2 * m <= count for strategy in ours(cell, 2, m)
                ]
                yield row(cell, pool.by_name(cell, strategies, batches))


def row(cell: Cell, found: dict[str, Record]) -> Record:
    return {
        "model": cell.model,
        "data": cell.data,
        "context": cell.context,
        "gpus": cell.gpus,
        "sequences": cell.sequences,
        "kernel": cell.kernel,
        "strategies": found,
    }


# -- seconds against head-tail context parallelism -------------------------------------------------

# data, context, sequences: published seconds of disaggregation, WLB-LLM and head-tail.
AGAINST_CP = {
    ("pretrain", 256, 8): (14.1, 15.0, 23.5),
    ("pretrain", 512, 4): (19.8, 24.6, 38.1),
    ("prolong", 128, 16): (8.0, 8.3, 10.0),
    ("prolong", 256, 8): (10.9, 11.6, 15.4),
    ("prolong", 512, 4): (20.1, 20.8, 30.2),
}


def against_cp(pool: Pool, batches: int) -> Iterator[Record]:
    for (data, context, sequences), published in AGAINST_CP.items():
        for kernel in KERNELS:
            cell = Cell("llama-34b", data, context, 256, sequences, kernel)
            strategies = [*splits(cell, "head-tail-cp"), *splits(cell, "wlb"), *ours(cell)]
            yield row(cell, pool.by_name(cell, strategies, batches)) | {"published": published}


# -- stragglers, and the all-gather ---------------------------------------------------------------

IDLE = {1: 0.017, 2: 0.019, 4: 0.192, 8: 0.554}  # published, of WLB-LLM's packing at each dp
GATHER = {2: 0.027, 4: 0.06, 8: 0.135, 16: 0.265, 32: 0.397}  # published, by nodes


def idle(pool: Pool, batches: int) -> Iterator[Record]:
    """8B, 512K, 64 GPUs, four sequences (the published batch is not known)."""
    cell = Cell("llama3-8b", "pretrain", 512, 64, 4)
    strategies = [Strategy("wlb", MeshShape(1, dp, 8 // dp, TP)) for dp in IDLE]
    strategies.append(Strategy("distca", MeshShape(1, 1, 8, TP)))
    records = pool.run([Job(cell, strategy, 4 * batches) for strategy in strategies])
    shares = [*IDLE.items(), ("distca", 0.021)]
    for (dp, published), record in zip(shares, records, strict=True):
        assert record is not None
        yield {"dp": dp, "published": published} | record


def gather(pool: Pool, batches: int) -> Iterator[Record]:
    """8B, documents of 32K, one context-parallel group over all nodes; any number of tokens."""
    for nodes, published in GATHER.items():
        cell = Cell("llama3-8b", "fixed:32768", 32, nodes * TP, 4 * nodes)
        strategy = Strategy("per-document-cp", MeshShape(1, 1, nodes, TP))
        (record,) = pool.run([Job(cell, strategy, 1)])
        assert record is not None
        yield {"nodes": nodes, "published": published} | record


# -- other schedules ------------------------------------------------------------------------------

PIPELINED = (
    ("llama3-8b", "pretrain", 128, 64, 32),
    ("llama3-8b", "prolong", 128, 64, 32),
    ("llama3-8b", "pretrain", 512, 128, 8),
    ("llama-34b", "pretrain", 256, 256, 32),
    ("llama3-70b", "pretrain", 128, 256, 64),
)


def pipeline(pool: Pool, batches: int) -> Iterator[Record]:
    """One to four stages: what idles bounds what interleaved stages could gain."""
    for numbers in PIPELINED:
        cell = Cell(*numbers)
        for pp in (1, 2, 4):
            counts = (1, 2, 4) if pp == 1 else (4, 8, 16)
            parallel = MeshShape(pp, 1, cell.workers(pp), TP)
            strategies = [
                Strategy("distca", parallel, m) for m in counts if 2 * m <= cell.sequences
            ]
            records = pool.run([Job(cell, strategy, batches) for strategy in strategies])
            yield row(cell, {}) | {"pp": pp, "best": best(records)}


PARTS = {
    "gather": gather,
    "idle": idle,
    "cp": against_cp,
    "3d": three_d,
    "4d": four_d,
    "pipeline": pipeline,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=list(PARTS))
    parser.add_argument("--batches", type=int, default=10, help="global batches of each cell")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    path = options.out / "paper.json"
    results: Record = json.loads(path.read_text()) if path.exists() else {}
    with ProcessPoolExecutor(options.workers) as executor:
        for name, part in PARTS.items():
            if options.only in (None, name):
                began, rows = time.perf_counter(), []
                for record in part(Pool(executor), options.batches):
                    rows.append(record)
                    print(f"{name} {len(rows)}: {time.perf_counter() - began:.0f} s", flush=True)
                results[name] = {
                    "date": str(date.today()),
                    "batches": options.batches,
                    "took_s": time.perf_counter() - began,
                    "rows": rows,
                }
                path.write_text(json.dumps(results, indent=1) + "\n")
    if options.out == RESULTS:
        write(results)
    else:
        print(report(results))


if __name__ == "__main__":
    main()
