"""Puts workers that hold parts of the same documents into the same node.

Balanced placement deals slices to workers without regard to nodes. Which worker has which set of
slices does not matter for its load, so the sets are dealt again: those that exchange most go to the
same node.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from distca.planning.placement import Placement
from distca.planning.problem import Problem
from distca.planning.spans import Ints
from distca.planning.tasks import Tasks
from distca.planning.traffic import flows


def gather_in_nodes(placement: Placement, problem: Problem) -> Placement:
    """Returns the placement with its workers renumbered, if that sends less between nodes.

    Workers of different speed, memory or other work keep their shards.
    """
    workers, devices = placement.num_workers, problem.devices
    node = devices.node[:workers]
    others = (devices.speed, devices.memory_bytes, devices.busy_s)
    if np.ptp(node) == 0 or any(np.ptp(values[:workers]) for values in others):
        return placement
    sent = _sent(placement, problem)
    order = _by_node(sent, np.bincount(node))
    number = np.empty_like(order)  # the new number of each worker
    number[order] = np.argsort(node, kind="stable")
    if _between(sent, node[number]) >= _between(sent, node):
        return placement
    table = [number[placement.worker], placement.document, placement.start, placement.stop]
    return Placement.from_shards(
        placement.lengths, np.stack(table).T, workers, placement.prefixes, placement.two_way
    )


def _sent(placement: Placement, problem: Problem) -> Ints:
    """Returns the bytes [workers, workers] of a forward pass with every task at home."""
    home = replace(problem, placement=placement)
    tasks = Tasks.at_home(placement, home.reach)
    moved = flows(tasks, placement, problem.shape, backward=False)
    sent = np.zeros((placement.num_workers,) * 2, np.int64)
    np.add.at(sent, (moved.source, moved.target), moved.out + moved.back)
    return sent + sent.T


def _by_node(sent: Ints, sizes: Ints) -> Ints:
    """Returns all workers, node by node: each begins with the one that exchanges most.

    Then come those that exchange most with the ones before. A node that has nobody left to add
    takes those that exchange least, and so are missed least by others.
    """
    total, left = sent.sum(axis=1), np.ones(len(sent), bool)
    order = []
    for size in sizes:
        near = np.zeros(len(sent), np.int64)  # bytes that each exchanges with this node
        for place in range(size):
            if place == 0:
                chosen = int(np.where(left, total, -1).argmax())
            elif np.any(near[left]):
                chosen = int(np.where(left, near, -1).argmax())
            else:
                chosen = int(np.where(left, total, np.iinfo(np.int64).max).argmin())
            order.append(chosen)
            left[chosen] = False
            near += sent[chosen]
            total = total - sent[chosen]
    return np.array(order, np.int64)


def _between(sent: Ints, node: Ints) -> int:
    return int(sent[node[:, None] != node[None]].sum())
