"""What must hold of every plan, checked from scratch; and why a bound is not met."""

from __future__ import annotations

import numpy as np

from distca.planning import masks
from distca.planning.costs.base import PS
from distca.planning.devices import UNLIMITED
from distca.planning.plan import Plan
from distca.planning.problem import Problem
from distca.planning.spans import Ints
from distca.planning.tasks import Tasks
from distca.planning.traffic import memory_bytes


def verify(plan: Plan) -> None:
    """Raises ``ValueError`` where a plan breaks a promise. Slow and obvious on purpose."""
    for name, tasks in (("forward", plan.forward), ("backward", plan.backward)):
        _verify_tasks(plan, tasks, name)
        _verify_memory(plan, tasks, name)
    for name, traffic in (("forward", plan.traffic), ("backward", plan.backward_traffic)):
        if traffic.send.sum() != traffic.recv.sum():
            raise ValueError(
                f"{name}: {traffic.send.sum()} bytes sent, {traffic.recv.sum()} received"
            )
    if plan.meets_bound and plan.imbalance > 1.0 + plan.tolerance:
        raise ValueError(f"imbalance {plan.imbalance} above 1 + {plan.tolerance}, and not said")


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
    # Every query token in exactly one task.
    fresh = np.diff(tasks.document, prepend=-1) != 0
    expected = np.where(fresh, 0, np.roll(tasks.q_stop, 1))
    last = np.append(fresh[1:], True)[: len(tasks)]
    if (
        np.any(tasks.q_start != expected)
        or np.any(tasks.q_stop[last] != length[last])
        or np.count_nonzero(fresh) != placement.num_documents
    ):
        raise ValueError(f"{name}: the tasks do not cover every query token exactly once")
    # Exactly the keys that the mask needs.
    if np.any(tasks.kv_start != masks.first_key(tasks.q_start, reach)) or np.any(
        tasks.kv_stop != masks.last_key(tasks.q_stop, length, reach)
    ):
        raise ValueError(f"{name}: a task has other keys than its mask needs")
    # Queries with one home, on a rank that serves.
    if np.any(tasks.home != placement.home(tasks.document, tasks.q_start)) or np.any(
        tasks.home != placement.home(tasks.document, tasks.q_stop - 1)
    ):
        raise ValueError(f"{name}: a task's queries live on more than one worker")
    if np.any(plan.devices.speed[tasks.server] == 0):
        raise ValueError(f"{name}: a task is on a rank that does not serve")


def shortfall(problem: Problem, work: tuple[Ints, Ints], policy: str) -> str:
    """One sentence on why the worst rank is above the bound; empty where it is not."""
    servers, tolerance = problem.devices, problem.tolerance
    imbalance, way = max(
        (servers.imbalance(work[0]), "forward"), (servers.imbalance(work[1]), "backward")
    )
    if imbalance <= 1.0 + tolerance:
        return ""
    loads = work[0] if way == "forward" else work[1]
    worst = int(np.argmax(servers.seconds_ps(loads)))
    bound = (1.0 + tolerance) * servers.mean_ps(int(loads.sum()))
    said = f"{way}, rank {worst} finishes at {imbalance:.3f} x mean"
    if policy != "distca":
        return f"{said}: policy {policy} bounds nothing"
    if servers.busy_ps[worst] > bound:
        return (
            f"{said}: it is busy with other work for {servers.busy_s[worst]:.3g} s,"
            f" past the bound of {bound / PS:.3g} s"
        )
    if np.any(servers.memory_bytes < UNLIMITED):
        return f"{said}: the ranks that finish first have no memory to take more of it"
    return (
        f"{said}: no single move of a task, whole or cut at a multiple of {problem.grain.step}"
        f" tokens into pieces of {problem.grain.minimum} or more, would lower it"
    )
