"""Checks of problems and plans, and the reason why a plan misses its bound."""

import numpy as np

from distca.planning import masks
from distca.planning.costs.base import PS
from distca.planning.devices import UNLIMITED
from distca.planning.plan import Plan
from distca.planning.problem import Assignment, DoesNotFitError, Problem
from distca.planning.spans import Ints
from distca.planning.tasks import Tasks
from distca.planning.traffic import memory_bytes


def verify(plan: Plan) -> None:
    """Raises ``ValueError`` if a plan is wrong. Recomputes everything from the tasks."""
    for name, tasks in (("forward", plan.forward), ("backward", plan.backward)):
        _verify_tasks(plan, tasks, name)
        _verify_memory(plan, tasks, name)
    for name, traffic in (("forward", plan.traffic), ("backward", plan.backward_traffic)):
        if traffic.send.sum() != traffic.recv.sum():
            raise ValueError(
                f"{name}: {traffic.send.sum()} bytes sent, {traffic.recv.sum()} received"
            )
    if plan.meets_bound and plan.imbalance > 1.0 + plan.tolerance:
        raise ValueError(
            f"imbalance {plan.imbalance} is above 1 + {plan.tolerance}, but the plan states no"
            " shortfall"
        )


def _verify_memory(plan: Plan, tasks: Tasks, name: str) -> None:
    used = memory_bytes(tasks, plan.placement, plan.shape, plan.devices.num_ranks)
    worst = int(np.argmax(used - plan.devices.memory_bytes))
    if used[worst] > plan.devices.memory_bytes[worst] and plan.meets_bound:
        raise ValueError(
            f"{name}: rank {worst} needs {used[worst]} bytes of memory,"
            f" but has {plan.devices.memory_bytes[worst]}"
        )


def _verify_tasks(plan: Plan, tasks: Tasks, name: str) -> None:
    placement = plan.placement
    length, reach = placement.lengths[tasks.document], plan.reach[tasks.document]
    # 1. Every query token is in exactly one task.
    is_first = np.diff(tasks.document, prepend=-1) != 0
    expected = np.where(is_first, 0, np.roll(tasks.q_stop, 1))
    last = np.append(is_first[1:], True)[: len(tasks)]
    if (
        np.any(tasks.q_start != expected)
        or np.any(tasks.q_stop[last] != length[last])
        or np.count_nonzero(is_first) != placement.num_documents
    ):
        raise ValueError(f"{name}: the tasks do not cover every query token exactly once")
    # 2. A task has exactly the keys that its mask needs.
    if np.any(tasks.kv_start != masks.first_key(tasks.q_start, reach)) or np.any(
        tasks.kv_stop != masks.last_key(tasks.q_stop, length, reach)
    ):
        raise ValueError(f"{name}: the keys of a task are not those that its mask needs")
    # 3. The queries of a task have one home, and its server computes attention.
    if np.any(tasks.home != placement.home(tasks.document, tasks.q_start)) or np.any(
        tasks.home != placement.home(tasks.document, tasks.q_stop - 1)
    ):
        raise ValueError(f"{name}: a task's queries live on more than one worker")
    if np.any(plan.devices.speed[tasks.server] == 0):
        raise ValueError(f"{name}: a task is on a rank that does not serve")


def check_representable(problem: Problem) -> None:
    """Raises ``ValueError`` if the attention in picoseconds would overflow 64-bit integers."""
    lengths = problem.placement.lengths.astype(np.float64)
    sample = np.asarray([1 << 16], dtype=np.int64)  # a document that fits at any rate
    ps_per_pair = float(problem.cost.backward_ps(sample, sample, sample * sample)[0]) / 2.0**32
    total_ps = float(np.sum(lengths * lengths)) * ps_per_pair
    if total_ps > 2.0**62:
        raise ValueError(
            f"documents of up to {lengths.max():.3g} tokens make {total_ps / PS:.3g} s of"
            f" attention, more than the {2.0**62 / PS:.3g} s that 64-bit picoseconds can hold:"
            " split them"
        )


def check_own_memory(problem: Problem) -> None:
    """Raises ``ValueError`` if a rank has more tokens than its memory holds."""
    token_bytes = 2 * problem.shape.q_bytes + problem.shape.kv_bytes
    own, limit = problem.placement.tokens * token_bytes, problem.devices.memory_bytes
    worst = int(np.argmax(own - limit[: len(own)]))
    if own[worst] > limit[worst]:
        raise ValueError(
            f"rank {worst} holds {problem.placement.tokens[worst]} tokens, {own[worst]} bytes of"
            f" q, k, v and o in one layer, but has {limit[worst]} bytes of memory for them:"
            " give it fewer tokens or more memory"
        )


def check_memory(problem: Problem, assignment: Assignment) -> None:
    """Raises ``DoesNotFitError`` if tasks and fetched keys need more memory than a rank has."""
    limit = problem.devices.memory_bytes
    for tasks in (assignment.forward, assignment.backward):
        used = memory_bytes(tasks, problem.placement, problem.shape, len(limit))
        worst = int(np.argmax(used - limit))
        if used[worst] > limit[worst]:
            raise DoesNotFitError(
                f"rank {worst} needs {used[worst]} bytes of memory for one layer's q, k, v and o"
                f" with the keys that it fetches, but has {limit[worst]}:"
                " give it fewer tokens or more memory"
            )


def shortfall(problem: Problem, work: tuple[Ints, Ints], *, bounded: bool) -> str:
    """Returns a sentence on why the slowest rank is above the bound; empty where it is not.

    bounded: whether the scheduler tries to meet the bound at all.
    """
    devices, tolerance = problem.devices, problem.tolerance
    imbalance, direction = max(
        (devices.imbalance(work[0]), "forward"), (devices.imbalance(work[1]), "backward")
    )
    if imbalance <= 1.0 + tolerance:
        return ""
    loads = work[0] if direction == "forward" else work[1]
    worst = int(np.argmax(devices.seconds_ps(loads)))
    bound = (1.0 + tolerance) * devices.mean_ps(int(loads.sum()))
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
    return (
        f"{slowest}: no single move of a task, whole or cut at a multiple of {problem.grain.step}"
        f" tokens into pieces of {problem.grain.minimum} or more, would lower it"
    )
