"""Batches of few ranks, a part of ``plan.py``: seconds of single plans and of steps with ping-pong.

Planning has to end before a small step does, so the aim is far below that for many ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np

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
COSTS = ("pairs", "analytic", "h200")
STEP = "step with ping-pong"  # balanced placement, both halves; up to 8 ranks
SEEDS = (0, 1, 2, 3)
BEST_OF = 3  # runs, of which the fastest counts


def few_ranks(quick: bool) -> list[dict[str, Any]]:
    """One row for each batch, cost, and way to plan it."""
    seeds = SEEDS[:1] if quick else SEEDS
    return [row for case in product(DATA, SERVERS, COSTS, seeds) for row in _rows(*case)]


def _aim_s(way: str, servers: int) -> float | None:
    """Returns the seconds that are aimed at; for steps of 8 ranks there is no aim."""
    if way == STEP:
        return 0.06 if servers <= 4 else None
    return 0.03 if servers <= 8 else 0.1


def _rows(data: str, servers: int, cost: str, seed: int) -> Iterator[dict[str, Any]]:
    lengths = distribution(DATA[data], TOKENS).batch(TOKENS * servers, seed)
    given = Placement.in_order(lengths, servers)
    options = PlanOptions(model="llama3-8b", cost=cost)
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
        seconds = np.inf
        for _ in range(BEST_OF):
            began = time.process_time()
            plans = plan()
            seconds = min(seconds, time.process_time() - began)
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
        }


def few_ranks_report(rows: list[dict[str, Any]]) -> list[str]:
    """One line for each kind of batch: the slowest of all seeds and costs."""
    lines = [
        "",
        f"## Few ranks ({TOKENS // 1024}K tokens a rank; costs pairs, analytic, h200; best of"
        " three; one core)",
        "",
        "Imbalance is the largest of the plans that cuts at tiles allow to meet the bound.",
        "",
        "| data | servers | documents | plan | imbalance | mean seconds | slowest | its cost"
        " | aim |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    keys = dict.fromkeys((r["data"], r["servers"], r["way"]) for r in rows)
    for data, servers, way in keys:
        part = [r for r in rows if (r["data"], r["servers"], r["way"]) == (data, servers, way)]
        documents = [r["documents"] for r in part]
        slowest = max(part, key=lambda r: r["seconds"])
        aim = _aim_s(way, servers)
        late = " **above**" if aim is not None and slowest["seconds"] > aim else ""
        imbalance = max((r["imbalance"] for r in part if not r["shortfall"]), default=np.nan)
        lines.append(
            f"| {data} | {servers} | {min(documents)} to {max(documents)} | {way}"
            f" | {imbalance:.4f} | {np.mean([r['seconds'] for r in part]):.3f}"
            f" | {slowest['seconds']:.3f}{late} | {slowest['cost']}"
            f" | {'-' if aim is None else f'{aim:.2f}'} |"
        )
    return lines
