"""Tasks: spans of queries with one home, the keys they need, and the server that computes them."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from distca.planning.costs.base import TaskCost
from distca.planning.placement import Placement
from distca.planning.spans import Bools, Ints, Spans


@dataclass(frozen=True, eq=False)
class Tasks:
    """All tasks of one direction, sorted by (document, q_start). Arrays have one entry per task."""

    document: Ints
    q_start: Ints
    q_stop: Ints
    kv_start: Ints
    kv_stop: Ints
    home: Ints  # the worker on which the queries live
    server: Ints  # the rank that computes the task

    @classmethod
    def build(cls, placement: Placement, reach: Ints, rows: Ints) -> Tasks:
        """Builds tasks from spans of queries inside shards, and adds the keys that they need.

        Adjacent spans of one shard on one server become one task.

        rows: [4, spans] shard, q_start, q_stop, server
        """
        # Spans are disjoint, so one key orders them, in a third of the time of two.
        order = np.argsort(placement.document[rows[0]] * (rows[1].max(initial=0) + 1) + rows[1])
        shard, q_start, q_stop, server = rows[:, order]
        same = (shard[1:] == shard[:-1]) & (server[1:] == server[:-1])
        begins = np.append(True, ~(same & (q_start[1:] == q_stop[:-1])))[: len(shard)]
        first = np.flatnonzero(begins)
        last = np.append(first[1:], len(shard))[: len(first)] - 1
        shard, server = shard[first], server[first]
        q_start, q_stop = q_start[first], q_stop[last]
        document = placement.document[shard]
        masks = placement.masks(reach)
        return cls(
            document=document,
            q_start=q_start,
            q_stop=q_stop,
            kv_start=masks.first_key(document, q_start),
            kv_stop=masks.last_key(document, q_stop),
            home=placement.worker[shard],
            server=server,
        )

    @classmethod
    def at_home(cls, placement: Placement, reach: Ints) -> Tasks:
        """Returns one task per shard, computed on the worker that holds it."""
        shards = np.arange(len(placement.document), dtype=np.int64)
        rows = np.stack([shards, placement.start, placement.stop, placement.worker])
        return cls.build(placement, reach, rows)

    def __len__(self) -> int:
        return len(self.document)

    def only(self, chosen: Bools | Ints) -> Tasks:
        """Returns the chosen tasks."""
        return Tasks(*(getattr(self, field.name)[chosen] for field in fields(self)))

    @property
    def queries(self) -> Ints:
        return self.q_stop - self.q_start

    @property
    def keys(self) -> Ints:
        return self.kv_stop - self.kv_start

    @property
    def key_spans(self) -> Spans:
        """The keys of each task, as positions in its document; some may belong to its ancestors."""
        return Spans(self.document, self.kv_start, self.kv_stop)

    @property
    def moved(self) -> Ints:
        """Indices of the tasks whose server is not their home."""
        return np.flatnonzero(self.home != self.server)

    def pairs(self, placement: Placement, reach: Ints) -> Ints:
        """[tasks] Returns the query-key pairs of each task."""
        return placement.masks(reach).pairs(self.document, self.q_start, self.q_stop)

    def ps(self, placement: Placement, reach: Ints, cost: TaskCost) -> Ints:
        """[tasks] Returns what each task costs."""
        return placement.masks(reach).load(self.document, self.q_start, self.q_stop, cost.ps)

    def load_ps(self, placement: Placement, reach: Ints, cost: TaskCost, num_ranks: int) -> Ints:
        """[ranks] Returns the load of each rank."""
        total = np.zeros(num_ranks, np.int64)
        np.add.at(total, self.server, self.ps(placement, reach, cost))
        return total
