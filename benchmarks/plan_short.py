"""Batches of short documents, a part of ``plan.py``: bound, bytes and seconds."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product

import numpy as np
from plan_common import ABOVE, COSTS, MODEL, Row, allowed_s, ended, fastest

from distca.data.lengths import distribution
from distca.planning.api import place_and_plan
from distca.planning.checks import verify
from distca.planning.placement import Placement
from distca.planning.policies import policy_of

# Lengths of the first and of the second half of the ranks.
LENGTHS = {
    "chat": ("lognormal:150:0.8",) * 2,
    "SFT": ("lognormal:600:1.0",) * 2,
    "RL": ("lognormal:3000:0.7",) * 2,
    "64s and 20s": ("fixed:64", "fixed:20"),
    "chat and SFT": ("lognormal:150:0.8", "lognormal:600:1.0"),
    "chat and pretrain": ("lognormal:150:0.8", "pretrain"),
}
SERVERS, TOKENS = (8, 64, 512), (32768, 131072)


def short_cases(quick: bool) -> list[tuple[str, int, int]]:
    return [*product(LENGTHS, SERVERS[:1] if quick else SERVERS, TOKENS)]


def short(name: str, servers: int, tokens: int) -> Iterator[Row]:
    """Yields a row for each placement and cost."""
    halves = [
        ended(
            Placement.in_order(
                distribution(one, tokens).batch(tokens * servers // 2, seed), servers // 2
            )
        )
        for seed, one in enumerate(LENGTHS[name])
    ]
    lengths = np.concatenate([half.lengths for half in halves])
    worker = np.concatenate([halves[0].worker, halves[1].worker + servers // 2])
    number = np.arange(len(lengths))
    given = Placement(lengths, number, number * 0, lengths, worker, servers)
    for placement, cost in product(("given", "balanced"), COSTS):
        policy = policy_of("distca", placement)
        aim_s = allowed_s(len(lengths), servers)
        plan = partial(place_and_plan, given, policy, model=MODEL, cost=cost)
        made, seconds = fastest(plan)
        verify(made)
        yield {
            "data": name,
            "tokens": tokens,
            "servers": servers,
            "documents": len(lengths),
            "placement": placement,
            "cost": cost,
            "imbalance_before": made.imbalance_before,
            "imbalance": made.imbalance,
            "megabytes": made.traffic.total / servers / 1e6,
            "seconds": seconds,
            "allowed_s": aim_s,
        }


def short_report(rows: list[Row]) -> list[str]:
    """One line for each batch and placement; seconds and imbalance are the largest of all costs."""
    lines = [
        "",
        "## Short documents (largest of the costs pairs, analytic, h200; best of three;"
        f" {ABOVE}; one core)",
        "",
        "| data | tokens a rank | servers | documents | placement | imbalance before | imbalance"
        " | MB a rank | seconds | allowed |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    keys = dict.fromkeys((r["data"], r["tokens"], r["servers"], r["placement"]) for r in rows)
    for data, tokens, servers, placement in keys:
        part = [
            r
            for r in rows
            if (r["data"], r["tokens"], r["servers"], r["placement"])
            == (data, tokens, servers, placement)
        ]
        largest = {name: max(r[name] for r in part) for name in part[0] if name != "cost"}
        late = " **above**" if largest["seconds"] > largest["allowed_s"] else ""
        lines.append(
            f"| {data} | {tokens // 1024}K | {servers} | {largest['documents']} | {placement}"
            f" | {largest['imbalance_before']:.2f} | {largest['imbalance']:.4f}"
            f" | {largest['megabytes']:.1f} | {largest['seconds']:.3f}{late}"
            f" | {largest['allowed_s']:.3f} |"
        )
    return lines
