"""The head-tail greedy of the published system, as a baseline.

It balances causal pairs over in-place servers of equal speed, and bounds receivers only: a rank
gives at most what it has above the mean, and takes until it is within ``tolerance`` x mean.

1. The rank with the least load takes first.
2. It takes from the shard with the fewest bytes per pair, of ranks above the mean.
3. Queries leave a shard from its middle, as many head as tail tokens: a head token and its mirrored
   tail token always have start + stop + 1 pairs together.
"""

import numpy as np

from distca.planning.models import ModelShape
from distca.planning.placement import Placement
from distca.planning.problem import Assignment, Problem
from distca.planning.spans import IntOrInts, Ints, Span
from distca.planning.tasks import Tasks


def greedy(problem: Problem) -> Assignment:
    """Returns the tasks of the head-tail greedy for both directions."""
    devices, placement = problem.devices, problem.placement
    if devices.num_ranks > devices.num_workers or np.any(devices.speed != 1.0):
        raise ValueError("policy greedy supports only in-place servers of equal speed")
    if not np.all(problem.masks.is_causal):
        raise ValueError("policy greedy supports only causal masks")
    shards = _PeeledShards(placement)
    for server in np.argsort(shards.load, kind="stable").tolist():
        while shards.mean - shards.load[server] > problem.tolerance * shards.mean:
            if not shards.give_cheapest(server, problem.shape):
                break
    tasks = shards.tasks(problem.reach)
    return Assignment(tasks, tasks)


class _PeeledShards:
    """Shards of which the middle, [head, tail), has moved. Loads are query-key pairs."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        start, stop = placement.start, placement.stop
        self.head = start + (stop - start) // 2
        self.tail = self.head.copy()
        self.left = _pairs_below(stop) - _pairs_below(start)  # [shards] pairs still at home
        self.load = np.zeros(placement.num_workers, np.int64)  # [workers]
        np.add.at(self.load, placement.worker, self.left)
        self.mean = int(self.load.sum()) // placement.num_workers
        self.moved: list[tuple[int, int, int, int]] = []  # shard, q_start, q_stop, server

    def give_cheapest(self, server: int, shape: ModelShape) -> bool:
        """Moves queries of the cheapest shard to ``server``; returns whether there are any."""
        p = self.placement
        surplus, need = self.load[p.worker] - self.mean, self.mean - int(self.load[server])
        donors = np.flatnonzero((surplus > 0) & (self.left > 0))
        if not len(donors):
            return False
        given = np.minimum(np.minimum(surplus, need), self.left)[donors]
        pairs_per_two = (p.start + p.stop + 1)[
            donors
        ]  # of a head token and its mirrored tail token
        sent = shape.q_bytes * given / pairs_per_two + shape.kv_bytes * (p.stop[donors] + 1)
        best = int(np.argmin(sent / given))
        shard, pairs = int(donors[best]), int(given[best])
        tokens = pairs // int(pairs_per_two[best])
        if pairs == self.left[shard]:
            tokens = int(p.stop[shard] - p.start[shard])  # all that is left
        elif tokens == 0:
            return False
        head, tail = int(self.head[shard]), int(self.tail[shard])
        self.head[shard] = max(head - tokens, p.start[shard])
        self.tail[shard] = min(tail + tokens, p.stop[shard])
        self._move(shard, (int(self.head[shard]), head), server)
        self._move(shard, (tail, int(self.tail[shard])), server)
        return True

    def _move(self, shard: int, queries: Span, server: int) -> None:
        start, stop = queries
        pairs = _pairs_below(stop) - _pairs_below(start)
        self.moved.append((shard, start, stop, server))
        self.left[shard] -= pairs
        self.load[self.placement.worker[shard]] -= pairs
        self.load[server] += pairs

    def tasks(self, reach: Ints) -> Tasks:
        """Returns what moved, and the two ends of each shard that stay at home."""
        p, shards = self.placement, np.arange(len(self.head))
        moved = np.asarray(self.moved, np.int64).reshape(-1, 4).T
        at_home = (
            np.stack([shards, p.start, self.head, p.worker]),
            np.stack([shards, self.tail, p.stop, p.worker]),
        )
        spans = np.concatenate([moved, *at_home], axis=1)
        return Tasks.build(p, reach, spans[:, spans[1] < spans[2]])


def _pairs_below(position: IntOrInts) -> IntOrInts:
    """Returns the causal pairs of all queries before a position."""
    return position * (position + 1) // 2
