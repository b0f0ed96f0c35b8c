"""The shards of a problem as the scheduler sees them before anything moves."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np

from distca.planning import masks
from distca.planning.devices import Devices
from distca.planning.models import ModelShape
from distca.planning.placement import Placement
from distca.planning.problem import Price, Problem
from distca.planning.schedulers.cuttable import CuttableShard
from distca.planning.spans import Ints, Span
from distca.planning.tasks import Tasks
from distca.planning.traffic import Traffic, forward_traffic

KeySpans = dict[int, list[Span]]  # rank -> disjoint spans of one document's keys


@dataclass(frozen=True, eq=False)
class PlacedShards:
    """Loads, spans and homes of all shards, and where the tokens of each document live.

    One object serves all tries of a schedule, so that everything is computed once. Shards are
    numbered as in the placement.
    """

    problem: Problem
    price: Price
    _cuttable: dict[int, CuttableShard] = field(init=False, repr=False, default_factory=dict)
    _owners: dict[int, KeySpans] = field(init=False, repr=False, default_factory=dict)

    @property
    def placement(self) -> Placement:
        return self.problem.placement

    @property
    def devices(self) -> Devices:
        return self.problem.devices

    @property
    def shape(self) -> ModelShape:
        return self.problem.shape

    @cached_property
    def load(self) -> Ints:
        """[shards] Picoseconds of each shard without cuts."""
        placement = self.placement
        documents = self.problem.priced_documents(self.price)
        return documents.load(placement.document, placement.start, placement.stop)

    @cached_property
    def home(self) -> list[int]:
        """[shards] The worker of each shard."""
        home: list[int] = self.placement.worker.tolist()
        return home

    @cached_property
    def document(self) -> list[int]:
        """[shards] The document of each shard."""
        document: list[int] = self.placement.document.tolist()
        return document

    @cached_property
    def span(self) -> list[Span]:
        """[shards] The token positions of each shard."""
        bounds = self.placement.start.tolist(), self.placement.stop.tolist()
        return list(zip(*bounds, strict=True))

    @cached_property
    def heaviest_first(self) -> list[list[int]]:
        """[workers] The shards of each worker, the heaviest first."""
        placement = self.placement
        order = np.lexsort((-self.load, placement.worker))
        ends = np.searchsorted(placement.worker[order], np.arange(placement.num_workers + 1))
        return [order[first:last].tolist() for first, last in pairwise(ends.tolist())]

    @cached_property
    def load_at_home(self) -> Ints:
        """[ranks] The load of each rank if no shard moves."""
        load = np.zeros(self.devices.num_ranks, np.int64)
        np.add.at(load, self.placement.worker, self.load)
        return load

    @cached_property
    def traffic_at_home(self) -> Traffic:
        """The keys that documents which span workers need, if no shard moves."""
        at_home = Tasks.at_home(self.placement, self.problem.reach)
        return forward_traffic(at_home, self.placement, self.shape, self.devices.node)

    @cached_property
    def free_bytes_at_home(self) -> Ints:
        """[ranks] The memory beside local q, k, v and o and fetched keys, if no shard moves."""
        free = self.devices.memory_bytes - self.traffic_at_home.recv
        token_bytes = 2 * self.shape.q_bytes + self.shape.kv_bytes
        free[: self.placement.num_workers] -= self.placement.tokens * token_bytes
        return free

    @cached_property
    def several_nodes(self) -> bool:
        return bool(np.any(self.devices.node != self.devices.node[0]))

    def same_node(self, rank: int, other: int) -> bool:
        """Returns whether two ranks share a node; always False if there is only one node."""
        return self.several_nodes and bool(self.devices.node[rank] == self.devices.node[other])

    def serves(self, rank: int) -> bool:
        return bool(self.devices.speed[rank] > 0)

    def cuttable(self, shard: int) -> CuttableShard:
        """Returns the shard with the positions at which it may be cut."""
        if shard not in self._cuttable:
            document = self.document[shard]
            length, reach = self._lengths[document], self._reach[document]
            self._cuttable[shard] = CuttableShard.of(
                self.span[shard], length, reach, self.price, self.problem.grain
            )
        return self._cuttable[shard]

    def keys_needed(self, document: int, queries: Span) -> Span:
        """Returns the keys that some queries of a document need."""
        return masks.keys_needed(queries, self._lengths[document], self._reach[document])

    def owners(self, document: int) -> KeySpans:
        """Returns the workers on which the document's tokens live."""
        if document not in self._owners:
            owners: KeySpans = {}
            first, last = self._document_ends[document : document + 2]
            for shard in self.placement.by_document[first:last].tolist():
                owners.setdefault(self.home[shard], []).append(self.span[shard])
            self._owners[document] = owners
        return self._owners[document]

    def memory_bytes(self, document: int, queries: Span) -> int:
        """Returns what queries take on another server: q, o, and a packed copy of their keys."""
        first, last = self.keys_needed(document, queries)
        q_and_o = 2 * (queries[1] - queries[0]) * self.shape.q_bytes
        return q_and_o + (last - first) * self.shape.kv_bytes

    @cached_property
    def _lengths(self) -> list[int]:
        lengths: list[int] = self.placement.lengths.tolist()
        return lengths

    @cached_property
    def _reach(self) -> list[int]:
        reach: list[int] = self.problem.reach.tolist()
        return reach

    @cached_property
    def _document_ends(self) -> list[int]:
        """[documents + 1] The first shard of each document in ``placement.by_document``."""
        documents = np.arange(self.placement.num_documents + 1)
        ends: list[int] = np.searchsorted(self.placement.spans.group, documents).tolist()
        return ends
