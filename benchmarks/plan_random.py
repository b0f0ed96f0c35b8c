"""Random batches, a part of ``plan.py``: is every one of them planned in the seconds allowed?

A batch has any kind of lengths, among them mixtures that no training set has. The first 1,000 have
2 to 64 ranks, the others 96 to 512, for which the aim allows little more.
Some have dedicated servers, windows, nodes, ranks of unequal speed, or prefixes that documents
share. ``number`` is the seed of a batch: ``batch_of(number)`` draws it again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from plan_common import ABOVE, COSTS, Row, allowed_s, ended, fastest

from distca.data.lengths import distribution
from distca.planning.api import place_and_plan
from distca.planning.checks import verify
from distca.planning.placement import Placement
from distca.planning.policies import policy_of

BATCHES, BATCHES_OF_MANY_RANKS = 1000, 480
RANKS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
MANY_RANKS = (96, 128, 192, 256, 384, 512)
GROUPS = ((2, 8), (9, 16), (17, 32), (33, 64), (65, 128), (129, 256), (257, 512))  # in the report
DATA = (
    "pretrain", "prolong", "reasoning", "chat", "Python files", "RL", "equal lengths",
    "one long document", "mixtures",
)  # fmt: skip
PACKINGS = ("spanning", "ended", "tree")
CONTEXTS = (8192, 16384, 32768, 65536, 131072, 262144, 524288)
LONGEST_CHAT = 32768
MOST_TOKENS = 262144  # of a rank
TREE_DOCUMENTS = 400  # at most, where documents share prefixes
SLOWEST = 20  # batches in the report

Generator = np.random.Generator


@dataclass(frozen=True)
class RandomBatch:
    data: str
    context: int
    placement: Placement
    policy: str  # given or balanced
    cost: str
    packing: str  # ended, spanning or tree
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def num_servers(self) -> int:
        return self.placement.num_workers + int(self.options.get("servers", 0))

    def __str__(self) -> str:
        rest = [f"{name} {value}" for name, value in self.options.items() if name != "speed"]
        rest += ["unequal speeds"] * ("speed" in self.options)
        what = (f"{self.data} {self.context // 1024}K", self.packing, self.policy, self.cost, *rest)
        return ", ".join(what)


def random_cases(quick: bool) -> list[tuple[int]]:
    return [(number,) for number in range(20 if quick else BATCHES)]


def many_ranks_cases(quick: bool) -> list[tuple[int]]:
    return [(BATCHES + number,) for number in range(2 if quick else BATCHES_OF_MANY_RANKS)]


def random_batch(number: int) -> Iterator[Row]:
    """Yields the one row of a batch."""
    batch = batch_of(number)
    make = partial(
        place_and_plan,
        batch.placement,
        policy_of("distca", batch.policy),
        model="llama3-8b",
        cost=batch.cost,
        **batch.options,
    )
    documents = batch.placement.num_documents
    aim_s = allowed_s(documents, batch.num_servers)
    made, seconds = fastest(make)
    verify(made)
    yield {
        "number": number,
        "batch": str(batch),
        "ranks": batch.placement.num_workers,
        "policy": batch.policy,
        "documents": documents,
        "imbalance": made.imbalance,
        "shortfall": bool(made.shortfall),
        "seconds": seconds,
        "allowed_s": aim_s,
    }


def batch_of(number: int) -> RandomBatch:
    rng = np.random.default_rng(number)
    ranks = int(rng.choice(RANKS if number < BATCHES else MANY_RANKS))
    context = int(rng.choice(CONTEXTS))
    data, packing = (
        str(rng.choice(DATA)),
        str(rng.choice(["spanning"] * 6 + ["ended"] * 3 + ["tree"])),
    )
    if data == "chat":
        context = min(context, LONGEST_CHAT)
    tokens = min(ranks * context if rng.random() < 0.7 else 4 * context, ranks * MOST_TOKENS)
    lengths = _lengths(rng, data, context, tokens, seed=number)
    if packing == "tree":
        placement = _tree(rng, lengths[:TREE_DOCUMENTS], ranks)
    else:
        placement = Placement.in_order(lengths, ranks)
        placement = ended(placement) if packing == "ended" else placement
    return RandomBatch(
        data=data,
        context=context,
        placement=placement,
        policy=str(rng.choice(["given", "balanced"])),
        cost=str(rng.choice(COSTS)),
        packing=packing,
        options=_options(rng, ranks),
    )


def _options(rng: Generator, ranks: int) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if rng.random() < 0.25:
        options |= {"servers": int(rng.integers(1, 5)), "workers_serve": bool(rng.random() < 0.5)}
    if rng.random() < 0.12:
        options["mask"] = f"window:{rng.choice([512, 4096])}"
    if rng.random() < 0.08 and ranks % 2 == 0 and "servers" not in options:
        options["ranks_per_node"] = 2
    if rng.random() < 0.08:
        speeds = rng.choice([1.0, 0.5, 0.25], ranks + options.get("servers", 0))
        options["speed"] = speeds.tolist()
    return options


def _lengths(rng: Generator, data: str, context: int, tokens: int, seed: int) -> Any:
    if data == "Python files":
        return distribution("lognormal:3000:1.0", 8192).batch(tokens, seed)
    if data == "RL":
        count = max(4 * tokens // context, 2)
        return np.clip(rng.lognormal(np.log(context / 8), 1.2, count), 32, context).astype(int)
    if data == "equal lengths":
        return np.full(rng.integers(1, 200), rng.choice([context, context // 3 + 17]))
    if data == "one long document":
        short = max(context // 4, 2048)
        others = distribution("prolong", short).batch(max(tokens - context, short), seed)
        return rng.permutation(np.append(others, context))
    if data == "mixtures":
        return _mixture(rng, context, tokens)
    return distribution(data, context).batch(tokens, seed)


def _mixture(rng: Generator, context: int, tokens: int) -> Any:
    """Runs of very long, of equal, of nearly equal and of arbitrary documents."""
    runs: list[int] = []
    while sum(runs) < tokens:
        match rng.integers(4):
            case 0:
                runs.append(context)
            case 1:
                runs += [int(rng.integers(128, 1024))] * int(rng.integers(1, 64))
            case 2:
                runs += [context // 2 + int(rng.integers(200))] * int(rng.integers(1, 4))
            case _:
                runs += rng.integers(16, context // 4, rng.integers(1, 16)).tolist()
    return np.array(runs) if rng.random() < 0.5 else rng.permutation(runs)


def _tree(rng: Generator, lengths: Any, ranks: int) -> Placement:
    """Most documents continue a prefix of an earlier one; neighbours are on the same rank."""
    documents: list[Any] = []
    whole: list[int] = []  # tokens of each document with its prefix
    for number, length in enumerate(lengths.tolist()):
        prefix = 0
        if number and rng.random() < 0.8:
            parent = int(rng.integers(max(0, number - 4), number))
            prefix = int(rng.integers(1, whole[parent] + 1))
            documents.append({"length": length, "parent": parent, "prefix": prefix})
        else:
            documents.append(length)
        whole.append(prefix + length)
    rank = np.sort(rng.integers(0, ranks, len(documents)))
    return Placement.from_ranks(
        [[documents[i] for i in np.flatnonzero(rank == r)] for r in range(ranks)]
    )


def random_report(rows: list[Row]) -> list[str]:
    """Groups of ranks, and the batches that are closest to what is allowed."""
    lines = ["", f"## {len(rows)} random batches (best of three; {ABOVE}; one core)", ""]
    lines += ["| ranks | batches | median s | largest s | largest / allowed | above |"]
    lines += ["|---|---|---|---|---|---|"]
    for first, last in GROUPS:
        part = [r for r in rows if first <= r["ranks"] <= last]
        if part:
            seconds, shares = [r["seconds"] for r in part], [_share(r) for r in part]
            lines.append(
                f"| {first} to {last} | {len(part)} | {np.median(seconds):.3f}"
                f" | {max(seconds):.3f} | {max(shares):.2f} | {sum(s > 1 for s in shares)} |"
            )
    lines += ["", "The slowest, relative to what is allowed:", ""]
    lines += ["| number | ranks | batch | documents | imbalance | seconds | allowed |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for r in sorted(rows, key=_share, reverse=True)[:SLOWEST]:
        late = " **above**" if _share(r) > 1 else ""
        missed = " (bound missed)" if r["shortfall"] else ""
        lines.append(
            f"| {r['number']} | {r['ranks']} | {r['batch']} | {r['documents']}"
            f" | {r['imbalance']:.3f}{missed} | {r['seconds']:.3f}{late} | {r['allowed_s']:.3f} |"
        )
    return lines


def _share(row: Row) -> float:
    return float(row["seconds"] / row["allowed_s"])
