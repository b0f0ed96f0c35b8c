"""What must hold of every plan, checked from scratch; and why a bound is not met."""

from __future__ import annotations

import numpy as np

from distca.planning import masks
from distca.planning.costs import PS
from distca.planning.plan import Plan
from distca.planning.problem import Problem, Proposal
from distca.planning.spans import Ints
from distca.planning.tasks import Tasks


def verify(plan: Plan) -> None:
    """Raises ``ValueError`` where a plan breaks a promise. Slow and obvious on purpose."""
    for name, tasks in (("forward", plan.forward), ("backward", plan.backward)):
        _verify_tasks(plan, tasks, name)
    for name, traffic in (("forward", plan.traffic), ("backward", plan.backward_traffic)):
        if traffic.send.sum() != traffic.recv.sum():
            raise ValueError(
                f"{name}: {traffic.send.sum()} bytes sent, {traffic.recv.sum()} received"
            )
    if plan.meets_bound and plan.imbalance > 1.0 + plan.tolerance:
        raise ValueError(f"imbalance {plan.imbalance} above 1 + {plan.tolerance}, and not said")


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
    if np.any(plan.servers.speed[tasks.server] == 0):
        raise ValueError(f"{name}: a task is on a rank that does not serve")


def shortfall(problem: Problem, proposal: Proposal, work: tuple[Ints, Ints], policy: str) -> str:
    """One sentence on why the worst rank is above the bound; empty where it is not."""
    servers, tolerance = problem.servers, problem.tolerance
    ways = ("forward", "backward")
    imbalance, way = max((servers.imbalance(w), -i) for i, w in enumerate(work))
    way = -way
    if imbalance <= 1.0 + tolerance:
        return ""
    finish = servers.seconds_ps(work[way])
    worst = int(np.argmax(finish))
    bound = (1.0 + tolerance) * servers.mean_ps(int(work[way].sum()))
    said = f"{ways[way]}, rank {worst} finishes at {imbalance:.3f} x mean"
    if policy != "distca":
        return f"{said}: policy {policy} bounds nothing"
    if servers.busy_ps[worst] > bound:
        return (
            f"{said}: it is busy with other work for {servers.busy_s[worst]:.3g} s,"
            f" past the bound of {bound / PS:.3g} s"
        )
    tasks = (proposal.forward, proposal.backward)[way]
    mine = np.flatnonzero(tasks.server == worst)
    heaviest = mine[np.argmax(tasks.queries[mine])] if len(mine) else 0
    if np.any(servers.memory_bytes < (1 << 62)):
        return f"{said}: the other ranks have no memory left to take more"
    size = int(tasks.queries[heaviest]) if len(mine) else 0
    return (
        f"{said}: its longest task has {size} queries, cuts are {problem.grain.tile} tokens apart"
        f" and leave pieces of at least {problem.grain.minimum}, too coarse for the bound"
    )
