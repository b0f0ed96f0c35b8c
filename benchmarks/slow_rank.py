"""How much attention a slow GPU should keep: simulated steps with plans for different speeds of it.

    python benchmarks/slow_rank.py

One GPU computes everything at a fraction of the speed of the others. Its linear layers cannot move,
its attention can. *Equal*: plans do not know. *Learned*: plans know its speed, so all GPUs compute
attention for the same time, and the slow one is late by its linear layers. *Compensated*: plans
assume a lower speed, such that all GPUs end together (``speeds.compensated``). *Best*: the speed,
of a grid, with which plans give the shortest step. All figures are step times over those of the
same GPUs without a slow one, and means over the same batches. Writes slow_rank.md and .json.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from datetime import date
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from distca.pipeline.mesh import MeshShape
from distca.pipeline.speeds import compensated
from distca.pipeline.step_plan import StepPlan
from distca.planning.models import model_shape
from distca.sim.cluster import cluster
from distca.sim.scenario import Scenario, Strategy
from distca.sim.simulate import simulate
from distca.train.tick_record import planned_seconds

RESULTS = Path(__file__).parent / "results"
GPUS, SLOW_GPU, BATCHES = 8, 3, 3
SPEEDS = (0.6, 0.8, 0.9)
CONTEXTS = (32_768, 131_072)
LOWEST = 0.1  # of the speeds that plans assume
STEPS_OF_GRID = 10


def steps_s(scenario: Scenario, strategy: Strategy, assumed: float) -> float:
    """Returns the mean seconds of steps whose plans assume a speed of the slow GPU."""
    believed = replace(scenario, cluster=replace(scenario.cluster, slow={SLOW_GPU: assumed}))
    return fmean(
        simulate(
            scenario, strategy, batch, planned=simulate(believed, strategy, batch).planned
        ).step_s
        for batch in scenario.batches(BATCHES)
    )


def other_work(scenario: Scenario, strategy: Strategy) -> float:
    """Returns the seconds of other work over those of attention, of a step without a slow GPU."""
    outcome = simulate(scenario, strategy, next(scenario.batches(1)))
    assert isinstance(outcome.planned, StepPlan)
    attention_s = float(planned_seconds(outcome.planned).sum(0).mean())
    return float(outcome.busy_s.mean()) / attention_s - 1


def measure(context: int, placement: str, ping_pong: bool) -> list[dict[str, Any]]:
    gpus = replace(cluster("h200"), gpus=GPUS)
    scenario = Scenario(model_shape("llama3-8b"), gpus, context, GPUS * 131_072 // context)
    strategy = Strategy("distca", MeshShape(dp=GPUS), placement=placement, ping_pong=ping_pong)
    undisturbed, other = steps_s(scenario, strategy, 1.0), other_work(scenario, strategy)
    rows = []
    for speed in SPEEDS:
        slow = replace(scenario, cluster=replace(gpus, slow={SLOW_GPU: speed}))
        grid = {float(one): 0.0 for one in np.linspace(speed, LOWEST, STEPS_OF_GRID).round(3)}
        for assumed in grid:
            grid[assumed] = steps_s(slow, strategy, assumed) / undisturbed
        best = min(grid, key=lambda assumed: grid[assumed])
        speeds = np.ones(GPUS)
        speeds[SLOW_GPU] = speed
        lower = float(compensated(speeds, other)[SLOW_GPU])
        rows.append(
            {
                "context": context,
                "placement": placement,
                "ping_pong": ping_pong,
                "speed": speed,
                "equal": steps_s(slow, strategy, 1.0) / undisturbed,
                "learned": grid[speed],
                "compensated": steps_s(slow, strategy, lower) / undisturbed,
                "lower": lower,
                "best": grid[best],
                "assumed": best,
            }
        )
        print(rows[-1], file=sys.stderr)
    return rows


def report(rows: list[dict[str, Any]], command: str) -> str:
    lines = [
        "# One slow GPU, simulated",
        "",
        f"`{command}`, {date.today()}: Llama-3-8B on {GPUS} H200 in one node (dp {GPUS}), 1M tokens"
        f" of pretrain documents a step, {BATCHES} batches. Step times over those without a slow"
        " GPU.",
        "",
        "| context | placement | ping-pong | speed | equal plans | learned | compensated | assumed"
        " | best | assumed |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        times = [f"{row[name]:.3f}" for name in ("equal", "learned", "compensated", "best")]
        where = [f"{row['context'] >> 10}K", row["placement"], "on" if row["ping_pong"] else "off"]
        cells = [*where, row["speed"], *times[:3], row["lower"], times[3], row["assumed"]]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    command = " ".join(["python benchmarks/slow_rank.py", *sys.argv[1:]])
    rows = [
        row
        for context, placement, ping_pong in product(CONTEXTS, ("balanced", "given"), (False, True))
        for row in measure(context, placement, ping_pong)
    ]
    text = report(rows, command)
    print(text)
    options.out.joinpath("slow_rank.md").write_text(text)
    record = {"command": command, "date": str(date.today()), "rows": rows}
    options.out.joinpath("slow_rank.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
