"""Policies: from a problem to a proposal. Ours, and the published ones to compare with."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from distca.planning.costs.base import OneDirectionCost
from distca.planning.placement import Placement
from distca.planning.placers.head_tail import deal_each_document, deal_packed_sequence
from distca.planning.problem import Assignment, Problem
from distca.planning.schedulers.disaggregated import schedule
from distca.planning.schedulers.greedy import head_tail_greedy
from distca.planning.tasks import Tasks

Policy = Callable[[Problem], Assignment]


def disaggregated(problem: Problem) -> Assignment:
    """The scheduler: one set of tasks if it meets both bounds, else one for each direction."""
    placement, servers = problem.placement, problem.devices
    backward = schedule(problem, problem.cost.backward_ps)
    work, _ = backward.work_ps(placement, problem.reach, problem.cost, servers.num_ranks)
    one_way = isinstance(
        problem.cost, OneDirectionCost
    )  # then a second set would be the same again
    if one_way or servers.imbalance(work) <= 1.0 + problem.tolerance:
        return Assignment(placement, backward, backward)
    forward = schedule(problem, problem.cost.forward_ps, expected_work=int(work.sum()))
    return Assignment(placement, forward, backward)


def colocated(problem: Problem) -> Assignment:
    """Every query token is computed where it lives."""
    return _at_home(problem, problem.placement)


def greedy(problem: Problem) -> Assignment:
    """The published head-tail greedy; see ``planning.schedulers.greedy``."""
    servers = problem.devices
    if servers.num_ranks > servers.num_workers or np.any(servers.speed != 1.0):
        raise ValueError("policy greedy knows in-place servers of equal speed only")
    if np.any(problem.reach < problem.placement.lengths):
        raise ValueError("policy greedy knows causal masks only")
    tasks = head_tail_greedy(problem.placement, problem.reach, problem.shape, problem.tolerance)
    return Assignment(problem.placement, tasks, tasks)


def head_tail_cp(problem: Problem) -> Assignment:
    """Context parallelism of the packed sequence: worker i of c takes chunks i and 2c-1-i of 2c."""
    placement, cp = problem.placement, _group_size(problem)
    return _at_home(problem, deal_packed_sequence(placement, cp), gather=cp)


def per_document_cp(problem: Problem) -> Assignment:
    """Context parallelism of each document by itself: even for any documents, same all-gather."""
    placement, cp = problem.placement, _group_size(problem)
    return _at_home(problem, deal_each_document(placement, cp), gather=cp)


BREAK_EVEN_TOKENS = 131072  # where attention costs as much as the linear layers (8B, published)
TOKEN_LIMIT = 1.25  # of the mean, that a bin may hold


def variable_length_packing(problem: Problem) -> Assignment:
    """WLB-LLM: longest document first into the bin with least work; evens time, unevens tokens.

    A bin is a group of ``cp`` workers, which share its documents one by one.
    """
    placement, cp = problem.placement, _group_size(problem)
    lengths, bins = placement.lengths, placement.num_workers // cp
    limit = TOKEN_LIMIT * lengths.sum() / bins
    work, tokens = np.zeros(bins), np.zeros(bins)
    choice = np.zeros(len(lengths), np.int64)
    for document in np.argsort(-lengths, kind="stable"):
        length = float(lengths[document])
        fits = tokens + length <= limit
        least = np.argmin(np.where(fits, work, np.inf)) if fits.any() else np.argmin(tokens)
        choice[document] = least
        tokens[least] += length
        work[least] += (length / BREAK_EVEN_TOKENS) ** 2 + length / BREAK_EVEN_TOKENS
    order = np.argsort(choice, kind="stable")
    packed = Placement(
        lengths,
        order,
        np.zeros_like(order),
        lengths[order],
        choice[order] * cp,
        placement.num_workers,
    )
    if cp == 1:
        return _at_home(problem, packed)
    return _at_home(problem, deal_each_document(packed, cp), gather=cp)


POLICIES: dict[str, Policy] = {
    "distca": disaggregated,
    "colocated": colocated,
    "head-tail-cp": head_tail_cp,
    "per-document-cp": per_document_cp,
    "wlb": variable_length_packing,
    "greedy": greedy,
}
KEEP_PLACEMENT = ("distca", "colocated", "greedy")  # the others choose where tokens live


def _at_home(problem: Problem, placement: Placement, gather: int = 0) -> Assignment:
    if np.any(problem.devices.speed[: problem.devices.num_workers] == 0):
        raise ValueError(
            "this policy computes attention where the tokens live, but some workers do not serve:"
            " use policy distca with dedicated servers"
        )
    tasks = Tasks.at_home(placement, problem.reach)
    return Assignment(placement, tasks, tasks, gather)


def _group_size(problem: Problem) -> int:
    workers = problem.placement.num_workers
    if problem.cp < 1 or workers % problem.cp:
        raise ValueError(f"cp = {problem.cp} does not divide {workers} workers: choose a divisor")
    return problem.cp
