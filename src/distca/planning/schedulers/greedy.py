"""The head-tail greedy of the published system, as a baseline."""

import numpy as np

from distca.planning.models import ModelShape
from distca.planning.placement import Placement
from distca.planning.problem import Assignment, Problem
from distca.planning.spans import Ints
from distca.planning.tasks import Tasks


def greedy(problem: Problem) -> Assignment:
    """Returns the tasks of ``head_tail_greedy`` for both directions."""
    devices = problem.devices
    if devices.num_ranks > devices.num_workers or np.any(devices.speed != 1.0):
        raise ValueError("policy greedy supports only in-place servers of equal speed")
    if np.any(problem.reach < problem.placement.lengths):
        raise ValueError("policy greedy supports only causal masks")
    tasks = head_tail_greedy(problem.placement, problem.reach, problem.shape, problem.tolerance)
    return Assignment(tasks, tasks)


def head_tail_greedy(
    placement: Placement, reach: Ints, shape: ModelShape, tolerance: float
) -> Tasks:
    """Fills the rank with the least load first, with the cheapest head-tail pairs of other ranks.

    Balances causal pairs over in-place servers of equal speed. It bounds receivers only: a rank
    gives at most what it has above the mean, and takes until it is within ``tolerance`` x mean.
    """
    start, stop, owner = placement.start, placement.stop, placement.worker
    ends = start + stop + 1  # query-key pairs of one head token and its mirrored tail token
    head, tail = start + (stop - start) // 2, start + (stop - start) // 2
    left = (stop * (stop + 1) - start * (start + 1)) // 2
    load = np.bincount(owner, left, minlength=placement.num_workers).astype(np.int64)
    mean = int(load.sum()) // placement.num_workers
    keep_whole = np.ones(len(start), dtype=bool)
    cuts: list[tuple[int, int, int, int]] = []  # shard, q_start, q_stop, server
    donors = np.flatnonzero(load[owner] > mean)

    for server in np.argsort(load, kind="stable"):
        while mean - load[server] > tolerance * mean:
            need = mean - int(load[server])
            donors = donors[(load[owner[donors]] > mean) & (left[donors] > 0)]
            if not len(donors):
                break
            surplus = load[owner[donors]] - mean
            flow = np.minimum(np.minimum(surplus, need), left[donors])
            width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
            price = (width[0] * flow / ends[donors] + 2 * width[1] * (stop[donors] + 1)) / flow
            best = int(np.argmin(price))
            shard, amount = int(donors[best]), int(flow[best])
            if amount == left[shard]:
                spans = [
                    (int(start[shard]), int(head[shard])),
                    (int(tail[shard]), int(stop[shard])),
                ]
                head[shard], tail[shard] = start[shard], stop[shard]
            else:
                q = amount // int(ends[shard])
                if q == 0:
                    break
                spans = [
                    (int(max(head[shard] - q, start[shard])), int(head[shard])),
                    (int(tail[shard]), int(min(tail[shard] + q, stop[shard]))),
                ]
                head[shard], tail[shard] = spans[0][0], spans[1][1]
            for low, high in spans:
                if low < high:
                    cuts.append((shard, low, high, int(server)))
                    moved = (high * (high + 1) - low * (low + 1)) // 2
                    left[shard] -= moved
                    load[owner[shard]] -= moved
                    load[server] += moved
            keep_whole[shard] = False

    for shard in np.flatnonzero(~keep_whole).tolist():
        home = int(owner[shard])
        for span in ((start[shard], head[shard]), (tail[shard], stop[shard])):
            if span[0] < span[1]:
                cuts.append((shard, int(span[0]), int(span[1]), home))
    whole = np.flatnonzero(keep_whole)
    table = np.asarray(cuts, dtype=np.int64).reshape(-1, 4)
    return Tasks.build(
        placement,
        reach,
        np.concatenate([whole, table[:, 0]]),
        np.concatenate([start[whole], table[:, 1]]),
        np.concatenate([stop[whole], table[:, 2]]),
        np.concatenate([owner[whole], table[:, 3]]),
    )
