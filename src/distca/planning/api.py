"""``distca.plan``: lengths in, plan out."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from distca.planning.bounds import traffic_lower_bound
from distca.planning.checks import shortfall
from distca.planning.costs.base import PS, CostModel
from distca.planning.costs.choice import cost_model
from distca.planning.costs.profile import DEFAULT_COST
from distca.planning.devices import Devices
from distca.planning.masks import Mask, reach_of
from distca.planning.models import ModelShape, model_shape
from distca.planning.placement import Entry, Placement
from distca.planning.placers.balanced import balanced_placement
from distca.planning.plan import Plan
from distca.planning.policies import KEEP_PLACEMENT, POLICIES
from distca.planning.problem import Assignment, DoesNotFitError, Grain, Problem
from distca.planning.tasks import Tasks
from distca.planning.traffic import memory_bytes


def plan(
    ranks: Placement | Sequence[Iterable[Entry]],
    *,
    model: str | ModelShape | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    mask: str | Mask | Sequence[str | Mask] = "causal",
    placement: str = "given",
    policy: str = "distca",
    cost: str | CostModel = DEFAULT_COST,
    tolerance: float = 0.02,
    servers: int | Devices = 0,
    workers_serve: bool | None = None,
    speed: Sequence[float] | None = None,
    busy_s: Sequence[float] | None = None,
    memory_bytes: int | None = None,
    ranks_per_node: int | None = None,
    cp: int | None = None,
    tile: int = 128,
    min_shard: int = 128,
    orders: int = 8,
) -> Plan:
    """Plans one batch's core attention over all ranks.

    Every rank's documents are cut into tasks of queries and the keys they need; tasks move from
    ranks with too much attention to ranks with too little until none finishes later than
    ``(1 + tolerance)`` x mean, forward and backward each, moving as few bytes as it can.

    ranks: for each rank its documents, as lengths or as shards
        ``{"document": d, "start": s, "stop": e}`` of documents that span ranks; or a Placement.
    model: a name from ``distca.planning.models`` or a shape; or give heads, kv_heads, head_dim.
    mask: ``causal``, ``full`` or ``window:N``, for all documents or one for each.
    placement: ``given`` leaves tokens where they are; ``balanced`` places them anew so that tokens
        and attention are both even and (almost) only keys and values travel.
    cost: a profile's name or file, ``analytic``, ``pairs``, or a CostModel.
    servers: dedicated ranks beyond the workers. With some, workers serve only on request
        (``workers_serve=True``). Or a complete ``Devices``.
    speed, busy_s: one number per rank; memory_bytes: limit of one layer's q, k, v, o on a rank.
    cp: workers that share a packed sequence in the context-parallel policies.
    orders: with up to 32 ranks, so many orders of choosing are tried and the one that moves least
        is taken; 1 plans fastest, and moves a few per cent more.

    A plan that cannot meet the bound is returned all the same, and ``plan.shortfall`` says why.
    """
    began = time.perf_counter()
    if not 0.0 <= tolerance < 1.0:
        raise ValueError(f"tolerance = {tolerance}: it must be at least 0 and below 1")
    if orders < 1:
        raise ValueError(f"orders = {orders}: try 1 or more")
    if policy not in POLICIES:
        raise ValueError(f"policy {policy!r} is unknown: choose one of {', '.join(POLICIES)}")
    if placement not in ("given", "balanced"):
        raise ValueError(f"placement {placement!r} is unknown: choose given or balanced")
    if placement == "balanced" and policy not in KEEP_PLACEMENT:
        raise ValueError(f"policy {policy} places tokens itself: use it with placement given")
    given = ranks if isinstance(ranks, Placement) else Placement.from_ranks(ranks)
    shape = _shape(model, heads, kv_heads, head_dim)
    reach = reach_of(mask, given.num_documents)
    costs = cost_model(cost, shape)
    roles = _roles(
        given.num_workers,
        servers,
        workers_serve=workers_serve,
        speed=speed,
        busy_s=busy_s,
        memory_bytes=memory_bytes,
        ranks_per_node=ranks_per_node,
    )
    problem = Problem(
        placement=given,
        reach=reach,
        devices=roles,
        shape=shape,
        cost=costs,
        tolerance=tolerance,
        grain=Grain(tile, min_shard),
        cp=cp if cp is not None else _default_cp(given.num_workers),
        orders=orders,
    )
    _check_countable(problem)
    _check_own_memory(problem)
    before = Tasks.at_home(given, reach).work_ps(given, reach, costs, given.num_workers)
    if placement == "balanced":
        problem = replace(problem, placement=balanced_placement(problem))
    proposal = POLICIES[policy](problem)
    _check_memory(problem, proposal)
    work = (
        proposal.forward.work_ps(proposal.placement, reach, costs, roles.num_ranks)[0],
        proposal.backward.work_ps(proposal.placement, reach, costs, roles.num_ranks)[1],
    )
    return Plan(
        placement=proposal.placement,
        reach=reach,
        devices=roles,
        shape=shape,
        forward=proposal.forward,
        backward=proposal.backward,
        forward_work_ps=work[0],
        backward_work_ps=work[1],
        policy=policy if placement == "given" else f"{policy}, balanced placement",
        cost=costs.name,
        tolerance=tolerance,
        gather=proposal.gather,
        imbalance_before=max(Devices.of(given.num_workers).imbalance(w) for w in before),
        bytes_lower_bound=traffic_lower_bound(
            problem,
            int(work[0].sum()),
            free_placement=placement == "balanced" or policy not in KEEP_PLACEMENT,
        ),
        shortfall=shortfall(problem, work, policy),
        plan_s=time.perf_counter() - began,
    )


def _shape(
    model: str | ModelShape | None, heads: int | None, kv_heads: int | None, head_dim: int | None
) -> ModelShape:
    if model is not None:
        if (heads, kv_heads, head_dim) != (None, None, None):
            name = model if isinstance(model, str) else model.name
            raise ValueError(f"model {name} and heads are both given: give one of them")
        return model if isinstance(model, ModelShape) else model_shape(model)
    if heads is None or head_dim is None:
        raise ValueError("no model: give model, or heads, kv_heads and head_dim")
    return ModelShape("custom", heads, heads if kv_heads is None else kv_heads, head_dim)


def _roles(num_workers: int, servers: int | Devices, **options: Any) -> Devices:
    if isinstance(servers, int):
        return Devices.of(num_workers, servers, **options)
    extra = [name for name, value in options.items() if value is not None]
    if extra:
        raise ValueError(f"servers are complete, but {', '.join(extra)} is given too: give one")
    if servers.num_workers != num_workers:
        raise ValueError(
            f"the servers know {servers.num_workers} workers but {num_workers} hold tokens:"
            " give both the same number"
        )
    return servers


def _default_cp(workers: int) -> int:
    """A node's worth of workers, or the largest divisor below it."""
    return max(size for size in range(1, 9) if workers % size == 0)


def _check_countable(problem: Problem) -> None:
    """Picoseconds are counted in 64-bit integers; far longer documents than any would overflow."""
    lengths = problem.placement.lengths.astype(np.float64)
    sample = np.asarray([1 << 16], dtype=np.int64)  # which itself can be counted at any rate
    ps_per_pair = float(problem.cost.backward_ps(sample, sample, sample * sample)[0]) / 2.0**32
    total_ps = float(np.sum(lengths * lengths)) * ps_per_pair
    if total_ps > 2.0**62:
        raise ValueError(
            f"documents of up to {lengths.max():.3g} tokens make {total_ps / PS:.3g} s of"
            f" attention, more than the {2.0**62 / PS:.3g} s that can be counted: split them"
        )


def _check_memory(problem: Problem, proposal: Assignment) -> None:
    """A rank that keeps queries of a document that spans ranks also fetches its keys."""
    limit = problem.devices.memory_bytes
    for tasks in (proposal.forward, proposal.backward):
        used = memory_bytes(tasks, proposal.placement, problem.shape, len(limit))
        worst = int(np.argmax(used - limit))
        if used[worst] > limit[worst]:
            raise DoesNotFitError(
                f"rank {worst} needs {used[worst]} bytes of memory for one layer's q, k, v and o"
                f" with the keys that it fetches, but has {limit[worst]}:"
                " give it fewer tokens or more memory"
            )


def _check_own_memory(problem: Problem) -> None:
    """Own tokens must fit before anything can be received."""
    weight = 2 * problem.shape.q_bytes + problem.shape.kv_bytes
    own, limit = problem.placement.tokens * weight, problem.devices.memory_bytes
    worst = int(np.argmax(own - limit[: len(own)]))
    if own[worst] > limit[worst]:
        raise ValueError(
            f"rank {worst} holds {problem.placement.tokens[worst]} tokens, {own[worst]} bytes of"
            f" q, k, v and o in one layer, but has {limit[worst]} bytes of memory for them:"
            " give it fewer tokens or more memory"
        )
