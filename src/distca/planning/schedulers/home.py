"""Schedulers that move no queries: every task is computed where its queries live."""

from __future__ import annotations

import numpy as np

from distca.planning.problem import Assignment, Problem
from distca.planning.tasks import Tasks


def at_home(problem: Problem) -> Assignment:
    """Tasks at home; a document that spans workers has its missing keys fetched."""
    devices = problem.devices
    if np.any(devices.speed[: devices.num_workers] == 0):
        raise ValueError(
            "this policy computes attention where the tokens live, but some workers do not serve:"
            " use policy distca with dedicated servers"
        )
    tasks = Tasks.at_home(problem.placement, problem.reach)
    return Assignment(tasks, tasks)


def all_gather(problem: Problem) -> Assignment:
    """Tasks at home; each group of ``cp`` workers all-gathers its keys, needed or not."""
    tasks = at_home(problem).forward
    return Assignment(tasks, tasks, gather=problem.cp if problem.cp > 1 else 0)
