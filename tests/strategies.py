"""Hypothesis strategies for small batches with all unusual inputs that a trainer may pass.

Tiles are small too, so that documents of a few dozen tokens are cut and every token can be checked.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st

import distca
from distca.planning.api import place_and_plan
from distca.planning.models import ModelShape
from distca.planning.policies import policy_of

Entry = int | dict[str, int]
Draw = Callable[[st.SearchStrategy[Any]], Any]

# q and o weigh 32 bytes a token each, k and v 16 together.
SHAPE = ModelShape("tiny", heads=4, kv_heads=1, head_dim=4)
Q_BYTES, KV_BYTES = 32, 16
OWN_BYTES = 2 * Q_BYTES + KV_BYTES

MASKS = (
    "causal",
    "full",
    "window:1",
    "window:7",
    "window:40",
    "window:1000",
    "chunk:7",
    "chunk:32",
    "band:1",
    "band:9",
)
COSTS = ("pairs", "analytic", "h200")


@dataclass(frozen=True)
class Batch:
    """The arguments of one call of ``distca.plan``; prints as such."""

    ranks: list[list[Entry]]
    options: Mapping[str, Any] = field(default_factory=dict)

    def plan(self, **changes: Any) -> distca.Plan:
        """Plans the batch with the ``policy`` and ``placement`` of its options."""
        options = {"model": SHAPE, **self.options, **changes}
        policy = policy_of(options.pop("policy", "distca"), options.pop("placement", "given"))
        with cpu_limit(2.0):
            return place_and_plan(self.ranks, policy, **options)

    @property
    def tolerance(self) -> float:
        return float(self.options.get("tolerance", 0.02))


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Ends a call that hangs, so that its example can be shrunk; calls take milliseconds."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"no plan after {seconds} s of CPU time")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def shard(document: int, start: int, stop: int) -> dict[str, int]:
    return {"document": document, "start": start, "stop": stop}


def num_documents(ranks: list[list[Entry]]) -> int:
    entries = [entry for rank in ranks for entry in rank]
    named = {entry["document"] for entry in entries if isinstance(entry, dict)}
    return len(named) + sum(isinstance(entry, int) for entry in entries)


def document_lengths(max_length: int) -> st.SearchStrategy[int]:
    """One-token documents, short ones and long ones, even and odd."""
    return st.one_of(st.just(1), st.integers(1, 12), st.integers(max_length // 3, max_length))


@st.composite
def ranks(
    draw: Draw, max_ranks: int = 4, max_documents: int = 5, max_length: int = 120
) -> list[list[Entry]]:
    """Documents on ranks: whole, or as shards on any ranks in any order; some ranks are empty."""
    count = draw(st.integers(1, max_ranks))
    anywhere = st.integers(0, count - 1)
    held: list[list[Entry]] = [[] for _ in range(count)]
    for document in range(draw(st.integers(1, max_documents))):
        length = draw(document_lengths(max_length))
        if length == 1 or draw(st.integers(0, 2)):
            named = draw(st.booleans())
            held[draw(anywhere)].append(shard(document, 0, length) if named else length)
            continue
        cuts = draw(st.sets(st.integers(1, length - 1), min_size=1, max_size=3))
        for start, stop in pairwise([0, *sorted(cuts), length]):
            held[draw(anywhere)].append(shard(document, start, stop))
    return [draw(st.permutations(entries)) for entries in held]


def masks(documents: int) -> st.SearchStrategy[str | list[str]]:
    """One mask for all documents, or one for each."""
    one = st.sampled_from(MASKS)
    return st.one_of(st.just("causal"), one, st.lists(one, min_size=documents, max_size=documents))


def tokens_of(entries: list[Entry]) -> int:
    return sum(e if isinstance(e, int) else e["stop"] - e["start"] for e in entries)


@st.composite
def roles(draw: Draw, held: list[list[Entry]]) -> dict[str, Any]:
    """Servers in place, dedicated, or both, with speeds, other work, nodes and memory limits."""
    dedicated = draw(st.sampled_from([0, 0, 0, 1, 2]))
    count = len(held) + dedicated
    options: dict[str, Any] = {"servers": dedicated}
    if dedicated and draw(st.booleans()):
        options["workers_serve"] = True
    if draw(st.integers(0, 3)) == 0:
        speed = st.sampled_from([0.5, 1.0, 1.25, 2.0])
        options["speed"] = draw(st.lists(speed, min_size=count, max_size=count))
    if draw(st.integers(0, 3)) == 0:
        busy = st.sampled_from([0.0, 1e-9, 3e-6, 1e-4])
        options["busy_s"] = draw(st.lists(busy, min_size=count, max_size=count))
    if draw(st.integers(0, 3)) == 0:
        options["ranks_per_node"] = draw(st.integers(1, count))
    if draw(st.integers(0, 3)) == 0:
        most = max(tokens_of(entries) for entries in held)
        options["memory_bytes"] = int(most * OWN_BYTES * draw(st.sampled_from([1, 1.3, 2, 4])))
    return options


@st.composite
def grains(draw: Draw) -> dict[str, int]:
    tile = draw(st.sampled_from([1, 4, 16]))
    minimum = draw(st.sampled_from([1, tile, 2 * tile, 2 * tile + 3]))
    return {"tile": tile, "min_shard": minimum}


@st.composite
def batches(
    draw: Draw,
    max_ranks: int = 4,
    max_documents: int = 5,
    max_length: int = 120,
    costs: tuple[str, ...] = COSTS,
    with_roles: bool = True,
) -> Batch:
    """Batches with any combination of documents, masks, costs, tolerances, grains and roles."""
    held = draw(ranks(max_ranks, max_documents, max_length))
    options = {
        "mask": draw(masks(num_documents(held))),
        "cost": draw(st.sampled_from(costs)),
        "tolerance": draw(st.sampled_from([0.0, 0.02, 0.1, 0.3])),
        **draw(grains()),
    }
    return Batch(held, options | (draw(roles(held)) if with_roles else {}))


def causal_batches(**limits: Any) -> st.SearchStrategy[Batch]:
    """Batches with causal masks, equal servers, and costs that cutting does not change."""

    def plain(batch: Batch) -> Batch:
        return Batch(batch.ranks, {**batch.options, "mask": "causal"})

    return batches(costs=("pairs",), with_roles=False, **limits).map(plain)


@st.composite
def long_and_short(draw: Draw, max_ranks: int = 6) -> Batch:
    """A few long documents among many short ones: what balanced placement is made for."""
    count = draw(st.integers(2, max_ranks))
    tile = draw(st.sampled_from([4, 8]))
    long = draw(st.lists(st.integers(64, 320), min_size=1, max_size=count))
    short = draw(st.lists(st.integers(1, 24), min_size=12 * count, max_size=40 * count))
    held: list[list[Entry]] = [[] for _ in range(count)]
    for index, length in enumerate([*long, *short]):
        held[index % count].append(length)
    tolerance = draw(st.sampled_from([0.02, 0.1]))
    return Batch(held, {"cost": "pairs", "tolerance": tolerance, "tile": tile, "min_shard": tile})


@st.composite
def two_way_spans(draw: Draw, length: int, first: int = 0) -> list[list[int]]:
    """Disjoint spans of the tokens [first, length) of a document, which may touch."""
    if length == first:
        return []
    cuts = sorted(draw(st.sets(st.integers(first, length), max_size=6)))
    return [[a, b] for a, b in pairwise(cuts) if draw(st.booleans())]
