"""``distca.place`` and ``distca.plan``: documents to workers, then attention to ranks."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from distca.planning.bounds import traffic_lower_bound
from distca.planning.checks import (
    check_memory,
    check_own_memory,
    check_prefixes,
    check_representable,
    shortfall,
)
from distca.planning.costs.base import CostModel
from distca.planning.costs.choice import cost_model
from distca.planning.devices import Devices
from distca.planning.entries import BELOW, Entry
from distca.planning.options import MOST_RANKS, PlanOptions
from distca.planning.placement import Placement
from distca.planning.placers.balanced import balanced_placement
from distca.planning.placers.candidates import Placed
from distca.planning.placers.dynamic_groups import dynamic_groups
from distca.planning.placers.head_tail import packed_sequence_placement, per_document_placement
from distca.planning.placers.karmarkar_karp import karmarkar_karp
from distca.planning.placers.variable_length import variable_length_packing
from distca.planning.plan import Plan
from distca.planning.policies import GIVEN, POLICIES, Policy
from distca.planning.problem import Assignment, Problem
from distca.planning.schedulers.disaggregated import disaggregated
from distca.planning.schedulers.greedy import greedy
from distca.planning.schedulers.home import all_gather, at_home
from distca.planning.spans import Ints, as_ints
from distca.planning.tasks import Tasks
from distca.schema import choose, is_number, shown

Ranks = Placement | Sequence[Iterable[Entry]]

PLACERS: dict[str, Callable[[Problem], Placement | Placed]] = {
    GIVEN: lambda problem: problem.placement,
    "balanced": balanced_placement,
    "head-tail": packed_sequence_placement,
    "per-document": per_document_placement,
    "variable-length": variable_length_packing,
    "karmarkar-karp": karmarkar_karp,
    "dynamic-groups": dynamic_groups,
}
WITH_PREFIXES = (GIVEN, "balanced")  # placers that know documents which continue others
SCHEDULERS: dict[str, Callable[[Problem], Assignment]] = {
    "distca": disaggregated,
    "home": at_home,
    "all-gather": all_gather,
    "greedy": greedy,
}


def place(
    documents: Sequence[int] | Ints | Placement,
    workers: int | None = None,
    options: PlanOptions | None = None,
    *,
    placer: str = "balanced",
    **changes: Any,
) -> Placement:
    """Chooses the worker of every token, before any token is loaded.

    The linear layers do not depend on where a token lives. Balanced placement therefore gives every
    worker equal tokens and about equal attention, so that (almost) only keys and values are sent.

    documents: the length of each document, or a placement whose documents are to be placed again.
    workers: the number of ranks to place them on; that of the placement by default.
    options, changes: a ``PlanOptions``, and options by name that replace its own.
    placer: ``balanced``, or one of the published policies': ``head-tail``, ``per-document``,
        ``variable-length``, ``karmarkar-karp``, ``dynamic-groups``. ``given`` packs documents in
        order of arrival.
    """
    whole = isinstance(workers, int) and is_number(workers, 1, MOST_RANKS)
    if workers is not None and not whole:
        raise ValueError(
            f"workers = {shown(workers)}: give the number of workers, a whole number from 1 to"
            f" {MOST_RANKS}"
        )
    if not isinstance(documents, Placement):
        if workers is None:
            raise ValueError("workers is missing: give the number of workers to place documents on")
        documents = Placement.in_order(_lengths(documents), workers)
    elif workers not in (None, documents.num_workers):
        given = documents
        documents = Placement.in_order(given.lengths, workers, given.prefixes, given.two_way)
    return place_to_plan(documents, PlanOptions.of(options, changes), placer).placement


def _lengths(documents: Sequence[int] | Ints) -> Ints:
    """Returns the lengths of documents as an array; raises ValueError for anything else."""
    lengths = np.asarray(documents)
    whole = lengths.ndim == 1 and (lengths.dtype.kind in "iu" or not len(lengths))
    if not whole or lengths.min(initial=1) < 1 or lengths.max(initial=1) >= BELOW:
        raise ValueError(
            f"documents are {shown(documents)}: give a list with the length of each, whole numbers"
            " from 1 to below 2^40"
        )
    return as_ints(lengths)


def place_to_plan(documents: Placement, options: PlanOptions, placer: str) -> Placed:
    """Does what ``place`` does, and returns for ``plan`` what the placer has scheduled already."""
    choose_placement = choose(PLACERS, placer, "placer")
    problem = options.problem(documents)
    check_representable(problem)
    check_prefixes(problem)
    documents.two_way.check_masks(problem.reach)
    if documents.prefixes.exist and placer not in WITH_PREFIXES:
        raise ValueError(
            f"placer {placer} does not know documents that continue others: use one of"
            f" {', '.join(WITH_PREFIXES)}"
        )
    placed = choose_placement(problem)
    return placed if isinstance(placed, Placed) else Placed(placed)


def plan(
    placement: Ranks | Placed,
    options: PlanOptions | None = None,
    *,
    scheduler: str = "distca",
    given: Placement | None = None,
    **changes: Any,
) -> Plan:
    """Plans the core attention of one batch over all ranks.

    Documents are cut into tasks, each a span of queries and the keys they need. Tasks move from
    ranks with too much attention to ranks with too little, until no rank finishes later than
    ``(1 + tolerance)`` x the mean, in forward and in backward, moving as few bytes as possible. A
    plan that cannot meet this bound is returned all the same, and ``plan.shortfall`` says why.

    placement: a Placement; or for each rank its documents, as lengths or as shards
        ``{"document": d, "start": s, "stop": e}`` of documents that span ranks, or as documents
        with prefixes or two-way spans (``Placement.from_ranks``); or a Placed.
    options, changes: a ``PlanOptions``, and options by name that replace its own.
    scheduler: ``distca``; or ``home``, ``all-gather`` or ``greedy``, as published policies do.
    given: the placement before ``place``, if there was one. The plan's ``imbalance_before`` then
        refers to it, and ``bytes_lower_bound`` holds for any placement.
    """
    began = time.perf_counter()
    assign_tasks = choose(SCHEDULERS, scheduler, "scheduler")
    placed = placement if isinstance(placement, Placed) else Placed(_placement(placement))
    placement = placed.placement
    problem = PlanOptions.of(options, changes).problem(placement)
    check_representable(problem)
    check_prefixes(problem)
    placement.two_way.check_masks(problem.reach)
    check_own_memory(problem)
    is_ours = scheduler == "distca"
    assignment = (
        disaggregated(problem, placed.begun, placed.taken) if is_ours else assign_tasks(problem)
    )
    check_memory(problem, assignment)
    forward_load_ps, backward_load_ps = loads = assignment.load_ps(problem)
    before = placement if given is None else given
    return Plan(
        placement=placement,
        reach=problem.reach,
        devices=problem.devices,
        shape=problem.shape,
        forward=assignment.forward,
        backward=assignment.backward,
        forward_load_ps=forward_load_ps,
        backward_load_ps=backward_load_ps,
        policy=_policy_name(scheduler, is_given=before is placement),
        cost=problem.cost.name,
        tolerance=problem.tolerance,
        gather=assignment.gather,
        imbalance_before=_imbalance_at_home(before, problem.reach, problem.cost),
        bytes_lower_bound=traffic_lower_bound(
            problem, int(forward_load_ps.sum()), free_placement=before is not placement
        ),
        shortfall=shortfall(problem, loads, bounded=is_ours),
        plan_s=time.perf_counter() - began,
    )


def _placement(ranks: Ranks) -> Placement:
    return ranks if isinstance(ranks, Placement) else Placement.from_ranks(ranks)


def _policy_name(scheduler: str, *, is_given: bool) -> str:
    """Returns the policy of a scheduler that plans tokens where they are, else the scheduler."""
    names = (p.name for p in POLICIES.values() if (p.placer, p.scheduler) == (GIVEN, scheduler))
    return next(names, f"{scheduler} scheduler") if is_given else f"{scheduler} scheduler"


def _imbalance_at_home(placement: Placement, reach: Ints, cost: CostModel) -> float:
    """Returns the larger of both directions, with every task at home on workers of equal speed."""
    tasks, workers = Tasks.at_home(placement, reach), Devices.of(placement.num_workers)
    loads = (
        tasks.load_ps(placement, reach, direction, placement.num_workers)
        for direction in (cost.forward, cost.backward)
    )
    return max(map(workers.imbalance, loads))


def place_and_plan(
    ranks: Ranks, policy: Policy, options: PlanOptions | None = None, **changes: Any
) -> Plan:
    """Places the documents of ``ranks`` by a policy's placer, and plans them by its scheduler."""
    began = time.perf_counter()
    given = _placement(ranks)
    options = PlanOptions.of(options, changes)
    options = replace(options, cost=cost_model(options.cost, options.shape))  # read once
    placed = place_to_plan(given, options, policy.placer)
    planned = plan(placed, options, scheduler=policy.scheduler, given=given)
    return replace(planned, policy=policy.name, plan_s=time.perf_counter() - began)
