"""Batches of few ranks, a part of ``plan.py``: single plans, and steps with ping-pong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import numpy as np
from plan_common import ABOVE, COSTS, MODEL, Row, allowed_s, fastest

from distca.data.lengths import distribution
from distca.pipeline.mesh import MeshShape
from distca.pipeline.step_planner import StepPlanner
from distca.planning.api import place_and_plan
from distca.planning.checks import verify
from distca.planning.masks import Mask
from distca.planning.options import PlanOptions
from distca.planning.placement import Placement
from distca.planning.plan import Plan
from distca.planning.policies import policy_of

TOKENS = 8192  # of a rank, and the longest document
DATA = {  # Python files: most of the tokens are in documents of the longest length
    "Python files": "lognormal:5000:1.0",
    "pretrain": "pretrain",
    "reasoning": "reasoning",
}
SERVERS = (2, 4, 8, 16, 32)
STEP = "step with ping-pong"  # balanced placement, both halves; up to 8 ranks
SEEDS = (0, 1, 2, 3)


def few_ranks_cases(quick: bool) -> list[tuple[str, int, str, int]]:
    return [*product(DATA, SERVERS, COSTS, SEEDS[:1] if quick else SEEDS)]


def few_ranks(data: str, servers: int, cost: str, seed: int) -> Iterator[Row]:
    """Yields a row for each way to plan a batch."""
    lengths = distribution(DATA[data], TOKENS).batch(TOKENS * servers, seed)
    given = Placement.in_order(lengths, servers)
    options = PlanOptions(model=MODEL, cost=cost)
    planner = StepPlanner(
        MeshShape(dp=servers),
        (Mask.parse("causal"),),
        options,
        policy=policy_of("distca", "balanced"),
        ping_pong=True,
    )
    ways: dict[str, Callable[[], tuple[Plan, ...]]] = {
        "given": lambda: (place_and_plan(given, policy_of("distca", "given"), options),),
        "balanced": lambda: (place_and_plan(given, policy_of("distca", "balanced"), options),),
        STEP: lambda: planner.plan(lengths).slots[0][0],
    }
    for way, plan in ways.items():
        if way == STEP and (len(lengths) < 2 or servers > 8):
            continue  # a half needs a document
        aim_s = allowed_s(len(lengths), servers)
        plans, seconds = fastest(plan)
        for one in plans:
            verify(one)
        yield {
            "data": data,
            "servers": servers,
            "cost": cost,
            "seed": seed,
            "way": way,
            "documents": len(lengths),
            "imbalance": max(one.imbalance for one in plans),
            "shortfall": any(one.shortfall for one in plans),
            "seconds": seconds,
            "allowed_s": aim_s,
        }


def few_ranks_report(rows: list[Row]) -> list[str]:
    """One line for each kind of batch: the slowest of all seeds and costs."""
    lines = [
        "",
        f"## Few ranks ({TOKENS // 1024}K tokens a rank; costs pairs, analytic, h200; best of"
        f" three; {ABOVE}; one core)",
        "",
        "Imbalance is the largest of the plans that cuts at tiles allow to meet the bound.",
        "",
        "| data | servers | documents | plan | imbalance | mean seconds | slowest | its cost |",
        "|---|---|---|---|---|---|---|---|",
    ]
    keys = dict.fromkeys((r["data"], r["servers"], r["way"]) for r in rows)
    for data, servers, way in keys:
        part = [r for r in rows if (r["data"], r["servers"], r["way"]) == (data, servers, way)]
        documents = [r["documents"] for r in part]
        slowest = max(part, key=lambda r: r["seconds"])
        late = " **above**" if way != STEP and slowest["seconds"] > slowest["allowed_s"] else ""
        imbalance = max((r["imbalance"] for r in part if not r["shortfall"]), default=np.nan)
        lines.append(
            f"| {data} | {servers} | {min(documents)} to {max(documents)} | {way}"
            f" | {imbalance:.4f} | {np.mean([r['seconds'] for r in part]):.3f}"
            f" | {slowest['seconds']:.3f}{late} | {slowest['cost']} |"
        )
    return lines
