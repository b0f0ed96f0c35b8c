"""Slow reference results for plans: loops over tokens and dense masks, without the library.

A token is a pair (document, position). Tasks are read from a plan's JSON.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from strategies import KV_BYTES, Q_BYTES, Batch, Entry

from distca.planning.costs.choice import cost_model
from distca.planning.placement import Placement
from distca.planning.plan import Plan

Token = tuple[int, int]
Shard = tuple[int, int, int]  # document, start, stop


@cache
def dense_mask(mask: str, length: int) -> npt.NDArray[np.bool_]:
    """Returns the mask [queries, keys] of one document, computed entry by entry."""
    cells = np.zeros((length, length), dtype=bool)
    for query in range(length):
        for key in range(length):
            if mask == "full":
                cells[query, key] = True
            elif mask == "causal":
                cells[query, key] = key <= query
            elif mask.startswith("band:"):
                cells[query, key] = abs(query - key) <= int(mask.removeprefix("band:"))
            elif mask.startswith("chunk:"):
                size = int(mask.removeprefix("chunk:"))
                cells[query, key] = key <= query and key // size == query // size
            else:
                cells[query, key] = query - int(mask.removeprefix("window:")) < key <= query
    return cells


@dataclass(frozen=True)
class Task:
    """One task, with its keys and pairs counted in the dense mask."""

    document: int
    start: int
    stop: int
    server: int
    keys: frozenset[int]
    pairs: int


@dataclass(frozen=True)
class Bytes:
    """Bytes that each rank sends and receives, and those sent between nodes."""

    send: list[int]
    recv: list[int]
    cross_node: int


def planned(batch: Batch, **changes: Any) -> Plan | None:
    """Returns the plan, or None if a memory limit makes it impossible and the error says so."""
    try:
        return batch.plan(**changes)
    except ValueError as error:
        if "memory_bytes" not in batch.options or "memory" not in str(error):
            raise
        return None


def owner_of(placement: Placement, document: int, key: int) -> int:
    """Returns the document that has a key of a document, which may lie in its prefix."""
    prefixes = placement.prefixes
    while key < prefixes.length[document]:
        document = int(prefixes.parent[document])
    return document


def shards_of(ranks: Sequence[Sequence[Entry]]) -> list[list[Shard]]:
    """Returns the shards of each rank in order; documents are numbered as they appear."""
    numbers: dict[object, int] = {}
    shards: list[list[Shard]] = []
    for rank, entries in enumerate(ranks):
        shards.append([])
        for index, entry in enumerate(entries):
            if isinstance(entry, int):
                name, start, stop = (rank, index), 0, entry
            else:
                name, start, stop = entry["document"], entry["start"], entry["stop"]
            shards[-1].append((numbers.setdefault(name, len(numbers)), start, stop))
    return shards


def rows_of(ranks: Sequence[Sequence[Entry]]) -> list[list[Token]]:
    """Returns the tokens of each rank in order."""
    return [
        [(document, position) for document, start, stop in held for position in range(start, stop)]
        for held in shards_of(ranks)
    ]


def placed_rows(plan: Plan) -> list[list[Token]]:
    """Returns the tokens of each rank in order, from a plan's placement."""
    return [
        [(s["document"], position) for s in shards for position in range(s["start"], s["stop"])]
        for shards in plan.to_json()["placement"]
    ]


def homes_of(rows: Sequence[Sequence[Token]]) -> dict[Token, int]:
    return {token: rank for rank, tokens in enumerate(rows) for token in tokens}


def lengths_of(rows: Sequence[Sequence[Token]]) -> list[int]:
    lengths: dict[int, int] = {}
    for tokens in rows:
        for document, position in tokens:
            lengths[document] = max(lengths.get(document, 0), position + 1)
    return [lengths[document] for document in sorted(lengths)]


def mask_names(batch: Batch) -> list[str]:
    """Returns the mask of each document."""
    mask = batch.options.get("mask", "causal")
    count = len(lengths_of(rows_of(batch.ranks)))
    return [mask] * count if isinstance(mask, str) else list(mask)


def read_tasks(plan: Plan, masks: Sequence[str], *, backward: bool = False) -> list[Task]:
    """Returns the tasks of one direction. Keys and pairs come from the mask, not from the plan."""
    data = plan.to_json()
    rows = data["backward_tasks"] if backward and data["backward_tasks"] else data["tasks"]
    lengths = lengths_of(placed_rows(plan))
    tasks = []
    for row in rows:
        document, (start, stop) = row["document"], row["q"]
        seen = dense_mask(masks[document], lengths[document])[start:stop]
        keys = frozenset(np.flatnonzero(seen.any(axis=0)).tolist())
        tasks.append(Task(document, start, stop, row["server"], keys, int(seen.sum())))
    return tasks


def queries_of(tasks: Iterable[Task]) -> list[Token]:
    return [(t.document, position) for t in tasks for position in range(t.start, t.stop)]


def keys_needed(tasks: Iterable[Task], num_ranks: int) -> list[set[Token]]:
    """Returns the keys that each server needs, each key once."""
    needed: list[set[Token]] = [set() for _ in range(num_ranks)]
    for task in tasks:
        needed[task.server].update((task.document, key) for key in task.keys)
    return needed


def forward_bytes(plan: Plan, masks: Sequence[str]) -> Bytes:
    """Counts bytes by token: q out, o back, and each key once to a server that needs it."""
    return _bytes(plan, masks, out=Q_BYTES, home=Q_BYTES, keys_home=0, backward=False)


def backward_bytes(plan: Plan, masks: Sequence[str]) -> Bytes:
    """Counts bytes by token: q, o, do, a float per head, k and v out; dq, dk and dv back."""
    out = 3 * Q_BYTES + 4 * plan.shape.heads
    return _bytes(plan, masks, out=out, home=Q_BYTES, keys_home=KV_BYTES, backward=True)


def _bytes(
    plan: Plan, masks: Sequence[str], *, out: int, home: int, keys_home: int, backward: bool
) -> Bytes:
    node = plan.devices.node.tolist()
    rows, tasks = placed_rows(plan), read_tasks(plan, masks, backward=backward)
    homes = homes_of(rows)
    send, recv, cross = [0] * len(node), [0] * len(node), 0

    def move(source: int, target: int, size: int) -> None:
        nonlocal cross
        send[source] += size
        recv[target] += size
        cross += size * (node[source] != node[target])

    for task in tasks:
        for position in range(task.start, task.stop):
            worker = homes[task.document, position]
            if worker != task.server:
                move(worker, task.server, out)
                move(task.server, worker, home)
    for server, keys in enumerate(keys_needed(tasks, len(node))):
        for token in keys:
            if homes[token] != server:
                move(homes[token], server, KV_BYTES)
                move(server, homes[token], keys_home)
    return Bytes(send, recv, cross)


def memory_bytes(plan: Plan, masks: Sequence[str], *, backward: bool = False) -> list[int]:
    """Returns the bytes of each rank: q, k, v and o of its tokens, received queries and keys."""
    rows, tasks = placed_rows(plan), read_tasks(plan, masks, backward=backward)
    homes, ranks = homes_of(rows), plan.devices.num_ranks
    used = [(2 * Q_BYTES + KV_BYTES) * len(tokens) for tokens in rows]
    used += [0] * (ranks - len(rows))
    for task in tasks:
        for position in range(task.start, task.stop):
            used[task.server] += 2 * Q_BYTES * (homes[task.document, position] != task.server)
    for server, keys in enumerate(keys_needed(tasks, ranks)):
        used[server] += KV_BYTES * sum(homes[token] != server for token in keys)
    return used


def work_of(plan: Plan, masks: Sequence[str], cost: str, *, backward: bool = False) -> list[int]:
    """Returns the picoseconds of each rank's tasks on a device of speed 1.

    Each chunk of a task costs what a document of its own does.
    """
    direction = cost_model(cost, plan.shape).of(backward=backward)
    lengths = lengths_of(placed_rows(plan))
    work = [0] * plan.devices.num_ranks
    for task in read_tasks(plan, masks, backward=backward):
        seen, chunk = dense_mask(masks[task.document], lengths[task.document]), task.stop
        if masks[task.document].startswith("chunk:"):
            chunk = int(masks[task.document].removeprefix("chunk:"))
        borders = [task.start, *range(task.start // chunk * chunk + chunk, task.stop, chunk)]
        for start, stop in pairwise([*borders, task.stop]):
            part = seen[start:stop]
            numbers = (stop - start, int(part.any(axis=0).sum()), int(part.sum()))
            work[task.server] += int(direction.ps(*(np.asarray([n]) for n in numbers))[0])
    return work


def imbalance_of(work: Sequence[int], plan: Plan) -> Fraction:
    """Returns worst over mean finishing time; at the mean, all serving ranks would end together."""
    speeds = [Fraction(speed) for speed in plan.devices.speed.tolist()]
    busy = [round(seconds * 1e12) for seconds in plan.devices.busy_s.tolist()]
    finish = [
        b + (math.ceil(w / speed) if speed else 0)
        for w, speed, b in zip(work, speeds, busy, strict=True)
    ]
    mean = (sum(map(lambda s, b: s * b, speeds, busy)) + sum(work)) / sum(speeds)
    return max(finish) / mean if mean else Fraction(1)


def pack_in_order(lengths: Sequence[int], workers: int) -> list[list[Token]]:
    """Packs documents one after the other; worker w takes tokens [w T / W, (w + 1) T / W)."""
    tokens = [(d, position) for d, length in enumerate(lengths) for position in range(length)]
    borders = [len(tokens) * worker // workers for worker in range(workers + 1)]
    return [tokens[a:b] for a, b in pairwise(borders)]


def head_tail(tokens: Sequence[Any], members: int) -> list[list[Any]]:
    """Cuts a sequence into 2c chunks; member i takes chunks i and 2c - 1 - i."""
    ends = [len(tokens) * chunk // (2 * members) for chunk in range(2 * members + 1)]
    chunks = [list(tokens[a:b]) for a, b in pairwise(ends)]
    return [chunks[i] + chunks[2 * members - 1 - i] for i in range(members)]
