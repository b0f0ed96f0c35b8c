"""Tasks: the unit that moves. Queries with one home, the keys they need, and a server."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from distca.planning import masks
from distca.planning.costs.base import CostModel
from distca.planning.placement import Placement
from distca.planning.spans import Bools, Ints


@dataclass(frozen=True, eq=False)
class Tasks:
    """All tasks of one direction, sorted by (document, q_start). One array entry per task."""

    document: Ints
    q_start: Ints
    q_stop: Ints
    kv_start: Ints
    kv_stop: Ints
    home: Ints  # the worker that holds the queries
    server: Ints  # the rank that computes

    @classmethod
    def build(
        cls,
        placement: Placement,
        reach: Ints,
        shard: Ints,
        q_start: Ints,
        q_stop: Ints,
        server: Ints,
    ) -> Tasks:
        """From query spans of shards. Adjacent ones of a shard on one server become one task."""
        order = np.lexsort((q_start, placement.document[shard]))
        shard, q_start, q_stop, server = shard[order], q_start[order], q_stop[order], server[order]
        same = (shard[1:] == shard[:-1]) & (server[1:] == server[:-1])
        fresh = np.append(True, ~(same & (q_start[1:] == q_stop[:-1])))[: len(shard)]
        first = np.flatnonzero(fresh)
        last = np.append(first[1:], len(shard))[: len(first)] - 1
        shard, server = shard[first], server[first]
        q_start, q_stop = q_start[first], q_stop[last]
        document = placement.document[shard]
        length, doc_reach = placement.lengths[document], reach[document]
        return cls(
            document=document,
            q_start=q_start,
            q_stop=q_stop,
            kv_start=masks.first_key(q_start, doc_reach),
            kv_stop=masks.last_key(q_stop, length, doc_reach),
            home=placement.worker[shard],
            server=server,
        )

    @classmethod
    def at_home(cls, placement: Placement, reach: Ints) -> Tasks:
        """Every shard computed where it lives."""
        shards = np.arange(len(placement.document), dtype=np.int64)
        return cls.build(
            placement, reach, shards, placement.start, placement.stop, placement.worker
        )

    def __len__(self) -> int:
        return len(self.document)

    def only(self, chosen: Bools) -> Tasks:
        """Some of the tasks."""
        return Tasks(*(getattr(self, field.name)[chosen] for field in fields(self)))

    @property
    def queries(self) -> Ints:
        return self.q_stop - self.q_start

    @property
    def keys(self) -> Ints:
        return self.kv_stop - self.kv_start

    @property
    def moved(self) -> Ints:
        """Indices of the tasks whose queries travel."""
        return np.flatnonzero(self.home != self.server)

    def pairs(self, placement: Placement, reach: Ints) -> Ints:
        return masks.pairs(
            self.q_start, self.q_stop, placement.lengths[self.document], reach[self.document]
        )

    def work_ps(
        self, placement: Placement, reach: Ints, cost: CostModel, num_ranks: int
    ) -> tuple[Ints, Ints]:
        """Forward and backward work of every rank, in picoseconds of a speed-1 device."""
        pairs = self.pairs(placement, reach)
        work = []
        for price in (cost.forward_ps, cost.backward_ps):
            total = np.zeros(num_ranks, np.int64)
            np.add.at(total, self.server, price(self.queries, self.keys, pairs))
            work.append(total)
        return work[0], work[1]
