"""Schedulers that move no queries: every task is computed on its home."""

import numpy as np

from distca.planning.problem import Assignment, Problem
from distca.planning.tasks import Tasks


def at_home(problem: Problem) -> Assignment:
    """Computes every task at home; keys of documents that span workers are fetched if needed."""
    devices = problem.devices
    if np.any(devices.speed[: devices.num_workers] == 0):
        raise ValueError(
            "this policy computes attention where the tokens live, but some workers do not serve:"
            " use policy distca with dedicated servers"
        )
    tasks = Tasks.at_home(problem.placement, problem.reach)
    return Assignment(tasks, tasks)


def all_gather(problem: Problem) -> Assignment:
    """Computes every task at home; groups of ``cp`` workers all-gather their keys."""
    tasks = at_home(problem).forward
    return Assignment(tasks, tasks, gather=problem.cp if problem.cp > 1 else 0)
