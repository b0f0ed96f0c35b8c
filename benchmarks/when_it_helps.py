"""A map of which way to train is fastest, over contexts, long documents, GPUs and links.

    python benchmarks/when_it_helps.py              all cells, a few minutes on two cores
    python benchmarks/when_it_helps.py --draw       page and picture again, from the last results

Every way has the best of all its sizes without a pipeline on the batches of a cell. Writes
``results/when_it_helps.json``, the tables of docs/when-it-helps.md, and its picture.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

from when_it_helps_report import draw, write_page

from distca.pipeline.mesh import MeshShape
from distca.planning.models import MODELS
from distca.sim.cluster import Link, cluster
from distca.sim.scenario import Scenario, Strategy
from distca.sim.sweep import Sizes, best

RESULTS = Path(__file__).parent / "results" / "when_it_helps.json"
WAYS = {
    "kk": Strategy("kk", MeshShape()),
    "wlb": Strategy("wlb", MeshShape()),
    "dynamic-cp": Strategy("dynamic-cp", MeshShape()),
    "distca": Strategy("distca", MeshShape(), placement="balanced"),
}
TOKENS_PER_GPU = 32768
BATCHES = 1
CONTEXTS = (32, 128, 512)  # K
SHARES = (0.05, 0.3, 0.8)
MACHINES = ((32, 400), (128, 400), (128, 100))  # GPUs, and Gb/s of each between nodes


@dataclass(frozen=True)
class Cell:
    """What is simulated; ``gbit`` is the bandwidth of a GPU between nodes."""

    lengths: str
    context: int  # K
    gpus: int
    gbit: int = 400
    model: str = "llama3-8b"
    cluster: str = "h200"

    @property
    def scenario(self) -> Scenario:
        known = cluster(self.cluster)
        across = Link(self.gbit * 1e9 / 8, known.across.latency_s)
        machines = replace(known, gpus=self.gpus, across=across)
        context = self.context * 1024
        sequences = max(self.gpus * TOKENS_PER_GPU // context, 1)
        return Scenario(MODELS[self.model], machines, context, sequences, self.lengths)

    def record(self) -> dict[str, Any]:
        """Returns seconds, sizes and idle shares of every way."""
        scenario = self.scenario
        batches, limit = list(scenario.batches(BATCHES)), scenario.cluster.usable_bytes
        found: dict[str, Any] = {}
        for name, strategy in WAYS.items():
            result = best(scenario, strategy, Sizes(pp=(1,)), batches, limit_bytes=limit)
            if result.summary is not None and result.fits:
                one = result.summary
                found[name] = {"step_s": one.step_s, "sizes": one.strategy.sizes, "idle": one.idle}
        return asdict(self) | {"ways": found}


def the_map() -> Iterator[Cell]:
    """Yields cells with the same kind of data on several machines."""
    for gpus, gbit in MACHINES:
        for context in CONTEXTS:
            for share in SHARES:
                yield Cell(f"prolong:{share}", context, gpus, gbit)


def named() -> Iterator[Cell]:
    """Yields cells with the lengths of RL, SFT and pretraining, and with larger models."""
    for gpus in (16, 64):
        yield Cell("chat", 32, gpus)
        yield Cell("reasoning", 32, gpus)
        yield Cell("agent", 128, gpus)
        yield Cell("pretrain", 128, gpus)
    for lengths, context in (("pretrain", 128), ("prolong", 512)):
        yield Cell(lengths, context, 128, model="llama-34b", cluster="h100")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draw", action="store_true", help="simulate nothing")
    if not parser.parse_args().draw:
        began = time.process_time()
        record: dict[str, Any] = {"date": str(date.today()), "batches": BATCHES,
                                  "tokens_per_gpu": TOKENS_PER_GPU}  # fmt: skip
        for name, cells in (("named", named()), ("map", the_map())):
            record[name] = []
            for cell in cells:
                record[name].append(cell.record())
                print(record[name][-1], flush=True)
        record["cpu_s"] = round(time.process_time() - began)
        RESULTS.write_text(json.dumps(record, indent=1) + "\n")
    record = json.loads(RESULTS.read_text())
    write_page(record)
    draw(record)


if __name__ == "__main__":
    main()
