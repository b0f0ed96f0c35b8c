"""Checks of problems and plans, and the reason why a plan misses its bound."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from distca.planning.costs.base import PS
from distca.planning.devices import UNLIMITED, Devices
from distca.planning.masks import CAUSAL, FULL, Mask
from distca.planning.models import ModelShape
from distca.planning.placement import Placement
from distca.planning.problem import Assignment, DoesNotFitError, Problem
from distca.planning.spans import Ints, Spans, cover_error
from distca.planning.tasks import Tasks
from distca.planning.traffic import memory_bytes

if TYPE_CHECKING:
    from distca.planning.plan import Plan  # which calls ``verify``


def verify(plan: Plan) -> None:
    """Raises ``ValueError`` if a plan is wrong, such as one that was edited in its file."""
    if len(plan.reach) == plan.placement.num_documents:
        plan.placement.two_way.check_masks(plan.reach)
    for name, tasks in (("forward", plan.forward), ("backward", plan.backward)):
        wrong = _wrong_tasks(plan, tasks)
        if not wrong and plan.meets_bound:
            wrong = _missing_memory(tasks, plan.placement, plan.shape, plan.devices)
        if wrong:
            raise ValueError(f"{name}: {wrong}")
    if plan.meets_bound and plan.imbalance > 1.0 + plan.tolerance:
        raise ValueError(
            f"imbalance {plan.imbalance} is above 1 + {plan.tolerance}, but the plan states no"
            " shortfall"
        )


def _wrong_tasks(plan: Plan, tasks: Tasks) -> str:
    """Returns which rule the tasks of one direction break; empty if none."""
    placement, ranks = plan.placement, plan.devices.num_ranks
    if len(plan.reach) != placement.num_documents:
        return f"there are {len(plan.reach)} masks for {placement.num_documents} documents"
    for what, values, count in (
        ("document", tasks.document, placement.num_documents),
        ("server", tasks.server, ranks),
    ):
        if np.any((values < 0) | (values >= count)):
            return f"a task has a {what} that is not one of 0 to {count - 1}"
    masks = placement.masks(plan.reach)
    spans = Spans(tasks.document, tasks.q_start, tasks.q_stop)
    in_order = np.all(np.diff(tasks.document) >= 0) and np.all(tasks.queries > 0)
    if not in_order or cover_error(spans, placement.prefixes.length, placement.lengths):
        return "the tasks do not cover every query token exactly once, in order"
    if np.any(tasks.kv_start != masks.first_key(tasks.document, tasks.q_start)) or np.any(
        tasks.kv_stop != masks.last_key(tasks.document, tasks.q_stop)
    ):
        return "the keys of a task are not those that its mask needs"
    if np.any(tasks.home != placement.home(tasks.document, tasks.q_start)) or np.any(
        tasks.home != placement.home(tasks.document, tasks.q_stop - 1)
    ):
        return "a task's queries live on more than one worker"
    if np.any(plan.devices.speed[tasks.server] == 0):
        return "a task is on a rank that does not serve"
    return ""


def _missing_memory(tasks: Tasks, placement: Placement, shape: ModelShape, devices: Devices) -> str:
    """Returns which rank has too little memory for tasks and fetched keys; empty if none."""
    used = memory_bytes(tasks, placement, shape, devices.num_ranks)
    worst = int(np.argmax(used - devices.memory_bytes))
    if used[worst] <= devices.memory_bytes[worst]:
        return ""
    return (
        f"rank {worst} needs {used[worst]} bytes of memory for one layer's q, k, v and o with the"
        f" keys that it fetches, but has {devices.memory_bytes[worst]}:"
        " give it fewer tokens or more memory"
    )


def check_prefixes(problem: Problem) -> None:
    """Raises ``ValueError`` if a document continues another one under a mask that it may not have.

    The keys of a prefix belong to one kernel call of a server, so all its documents have one mask.
    """
    prefixes, reach = problem.placement.prefixes, problem.reach
    no_order = (reach == FULL) | (reach > CAUSAL)
    wrong = np.flatnonzero((prefixes.length > 0) & no_order)
    if len(wrong):
        raise ValueError(
            f"document {wrong[0]} has a prefix and mask {Mask(int(problem.reach[wrong[0]]))}:"
            " a document can continue another one only under masks causal, window:N and chunk:N"
        )
    wrong = np.flatnonzero((prefixes.length > 0) & (reach != reach[prefixes.parent]))
    if len(wrong):
        parent = int(prefixes.parent[wrong[0]])
        raise ValueError(
            f"document {wrong[0]} has mask {Mask(int(reach[wrong[0]]))}, but document {parent},"
            f" which it continues, has mask {Mask(int(reach[parent]))}: give them the same mask"
        )


def check_representable(problem: Problem) -> None:
    """Raises ``ValueError`` if the attention in picoseconds would overflow 64-bit integers."""
    lengths = problem.placement.lengths.astype(np.float64)
    sample = np.asarray([1 << 16], dtype=np.int64)  # tokens of a document that no rate overflows
    ps_per_pair = float(problem.cost.backward.ps(sample, sample, sample * sample)[0]) / 2.0**32
    total_ps = float(np.sum(lengths * lengths)) * ps_per_pair
    if total_ps > 2.0**62:
        raise ValueError(
            f"documents of up to {lengths.max():.3g} tokens make {total_ps / PS:.3g} s of"
            f" attention, more than the {2.0**62 / PS:.3g} s that 64-bit picoseconds can hold:"
            " split them"
        )


def check_own_memory(problem: Problem) -> None:
    """Raises ``ValueError`` if a rank has more tokens than its memory holds."""
    own = problem.placement.tokens * problem.shape.token_bytes
    limit = problem.devices.memory_bytes
    worst = int(np.argmax(own - limit[: len(own)]))
    if own[worst] > limit[worst]:
        raise ValueError(
            f"rank {worst} holds {problem.placement.tokens[worst]} tokens, {own[worst]} bytes of"
            f" q, k, v and o in one layer, but has {limit[worst]} bytes of memory for them:"
            " give it fewer tokens or more memory"
        )


def check_memory(problem: Problem, assignment: Assignment) -> None:
    """Raises ``DoesNotFitError`` if tasks and fetched keys need more memory than a rank has."""
    if np.all(problem.devices.memory_bytes == UNLIMITED):
        return
    for tasks in (assignment.forward, assignment.backward):
        missing = _missing_memory(tasks, problem.placement, problem.shape, problem.devices)
        if missing:
            raise DoesNotFitError(missing)


def shortfall(problem: Problem, loads: tuple[Ints, Ints], *, bounded: bool) -> str:
    """Returns a sentence on why the slowest rank is above the bound; empty where it is not.

    bounded: whether the scheduler tries to meet the bound at all.
    """
    devices, tolerance = problem.devices, problem.tolerance
    forward, backward = (devices.imbalance(load) for load in loads)
    imbalance = max(forward, backward)
    if imbalance <= 1.0 + tolerance:
        return ""
    direction, load = ("forward", loads[0]) if forward >= backward else ("backward", loads[1])
    worst = int(np.argmax(devices.finish_ps(load)))
    bound = (1.0 + tolerance) * devices.mean_ps(int(load.sum()))
    slowest = f"{direction}, rank {worst} finishes at {imbalance:.3f} x mean"
    if not bounded:
        return f"{slowest}: this policy does not bound it"
    if devices.busy_ps[worst] > bound:
        return (
            f"{slowest}: it is busy with other work for {devices.busy_s[worst]:.3g} s,"
            f" longer than the bound of {bound / PS:.3g} s"
        )
    if np.any(devices.memory_bytes < UNLIMITED):
        return f"{slowest}: the ranks that finish first have no memory to take more of its tasks"
    grain = problem.grain
    return (
        f"{slowest}: with the work that it may do, the scheduler found no move of a task, whole or"
        f" cut at a multiple of {grain.spacing} tokens into pieces of {grain.min_shard} or more,"
        " that would lower it further"
    )
