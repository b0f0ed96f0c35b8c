"""The shards of a problem as the scheduler sees them before anything moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from distca.planning import masks
from distca.planning.costs.base import TaskCost
from distca.planning.problem import DocumentLoads, Problem
from distca.planning.schedulers.cuttable import CuttableShards
from distca.planning.spans import Bools, Ints, Span, as_ints
from distca.planning.tasks import Tasks
from distca.planning.traffic import Traffic, traffic

KeySpans = dict[int, list[Span]]  # rank -> disjoint spans of one document's keys


@dataclass(frozen=True, eq=False)
class PlacedShards:
    """Loads, spans and homes of all shards, and where the tokens of each document live.

    One object serves all tries of a schedule. Shards are numbered as in the placement.
    """

    problem: Problem
    cost: TaskCost
    documents: DocumentLoads
    load: Ints  # [shards] without cuts
    is_document: Bools  # [shards] whether the shard is a whole document
    home: list[int]  # [shards]
    document: list[int]  # [shards]
    heaviest_first: list[Ints]  # [workers] the shards of each worker
    traffic_at_home: Traffic  # keys that documents which span workers need, if no shard moves
    several_nodes: bool
    _lengths: list[int]  # [documents]
    _reach: list[int]  # [documents]
    _ends: list[int]  # [documents + 1] first shard of each document in ``placement.by_document``
    _owners: dict[int, KeySpans] = field(default_factory=dict)

    @classmethod
    def of(cls, problem: Problem, cost: TaskCost) -> PlacedShards:
        placement, node = problem.placement, problem.devices.node
        spans = placement.document, placement.start, placement.stop
        documents = problem.document_loads(cost.ps)
        load = documents.load(*spans)
        by_load = np.lexsort((-load, placement.worker))
        ends = np.searchsorted(placement.worker[by_load], np.arange(placement.num_workers + 1))
        at_home = Tasks.at_home(placement, problem.reach)
        numbers = np.arange(placement.num_documents + 1)
        return cls(
            problem=problem,
            cost=cost,
            documents=documents,
            load=load,
            is_document=placement.stop - placement.start == placement.lengths[placement.document],
            home=placement.worker.tolist(),
            document=placement.document.tolist(),
            heaviest_first=np.split(by_load, ends[1:-1]),
            traffic_at_home=traffic(at_home, placement, problem.shape, node),
            several_nodes=bool(np.any(node != node[0])),
            _lengths=placement.lengths.tolist(),
            _reach=problem.reach.tolist(),
            _ends=np.searchsorted(placement.spans.group, numbers).tolist(),
        )

    def span(self, shard: int) -> Span:
        placement = self.problem.placement
        return int(placement.start[shard]), int(placement.stop[shard])

    def same_node(self, rank: int, other: int) -> bool:
        """Returns whether two ranks share a node; always False if there is only one node."""
        node = self.problem.devices.node
        return self.several_nodes and bool(node[rank] == node[other])

    def cuttable(self, shards: Sequence[int]) -> CuttableShards:
        """Returns shards with the positions at which they may be cut."""
        placement = self.problem.placement
        chosen = as_ints(shards)[:, None]
        document = placement.document[chosen]
        return CuttableShards(
            start=placement.start[chosen],
            stop=placement.stop[chosen],
            length=placement.lengths[document],
            reach=self.problem.reach[document],
            total_load=self.load[chosen],
            cost=self.cost,
            grain=self.problem.grain,
        )

    def load_of(self, shard: Ints, start: Ints, stop: Ints) -> Ints:
        """Returns the load of queries [start, stop) of each shard."""
        return self.documents.load(self.problem.placement.document[shard], start, stop)

    def num_keys(self, shard: Ints, start: Ints, stop: Ints) -> Ints:
        """Returns how many keys queries [start, stop) of each shard need."""
        document = self.problem.placement.document[shard]
        length, reach = self.problem.placement.lengths[document], self.problem.reach[document]
        return masks.last_key(stop, length, reach) - masks.first_key(start, reach)

    def keys_needed(self, document: int, queries: Span) -> Span:
        """Returns the keys that some queries of a document need."""
        return masks.keys_needed(queries, self._lengths[document], self._reach[document])

    def owners(self, document: int) -> KeySpans:
        """Returns the workers on which the document's tokens live."""
        if document not in self._owners:
            owners: KeySpans = {}
            first, last = self._ends[document : document + 2]
            for shard in self.problem.placement.by_document[first:last].tolist():
                owners.setdefault(self.home[shard], []).append(self.span(shard))
            self._owners[document] = owners
        return self._owners[document]

    def memory_bytes(self, document: int, queries: Span) -> int:
        """Returns what queries take on another server: q, o, and a packed copy of their keys."""
        first, last = self.keys_needed(document, queries)
        q_and_o = 2 * (queries[1] - queries[0]) * self.problem.shape.q_bytes
        return q_and_o + (last - first) * self.problem.shape.kv_bytes
