"""The shards of a problem as the scheduler sees them before anything moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from distca.planning.costs.base import TaskCost
from distca.planning.masks import FULL
from distca.planning.problem import DocumentLoads, Problem
from distca.planning.schedulers.cuttable import CuttableShards
from distca.planning.schedulers.key_spans import KeysOnRanks, KeySpans, joined
from distca.planning.spans import Bools, Ints, Span, as_ints
from distca.planning.tasks import Tasks
from distca.planning.traffic import Traffic, traffic

MANY_TILES = 8  # of a document, beyond which the place of a cut hardly matters
FEW_RANKS = 32  # up to which single cuts matter; with more, differences average out
NO_RANK, NOT_LOOKED_AT = -1, -2  # instead of a rank
EXACT = 0.95  # share of the searches for cuts that have to end at the best one, beyond so many


@dataclass(frozen=True, eq=False)
class PlacedShards:
    """Loads, spans and homes of all shards, and where the tokens of each document live.

    One object serves all tries of a schedule. Shards are numbered as in the placement.
    """

    problem: Problem
    cost: TaskCost
    documents: DocumentLoads
    load: Ints  # [shards] without cuts
    is_document: Bools  # [shards] whether the shard is a whole document and shares no prefix
    home: list[int]  # [shards]
    document: list[int]  # [shards]
    tasks_at_home: Tasks  # of shards that are not whole documents
    traffic_at_home: Traffic  # keys that documents which span workers need, if no shard moves
    several_nodes: bool
    moves_to_keys: Ints  # [2, shards] what ``moves_to_keys`` has found: saved bytes, and the worker
    _first: list[int]  # [workers + 1] the first shard of each worker
    _homes: dict[int, KeySpans] = field(default_factory=dict)
    _owners: dict[int, KeySpans] = field(default_factory=dict)
    _owner_spans: dict[int, tuple[Ints, list[tuple[int, Span]]]] = field(default_factory=dict)
    _held: dict[int, KeySpans] = field(default_factory=dict)
    _parts: dict[int, list[tuple[int, Span]]] = field(default_factory=dict)

    @classmethod
    def of(cls, problem: Problem, cost: TaskCost) -> PlacedShards:
        placement, node = problem.placement, problem.devices.node
        documents = problem.document_loads(cost.ps)
        size, shared = placement.stop - placement.start, placement.prefixes.shared
        is_document = (size == placement.lengths[placement.document]) & ~shared[placement.document]
        cut = np.flatnonzero(~is_document)  # the others need no keys but their own
        rows = np.stack([cut, placement.start[cut], placement.stop[cut], placement.worker[cut]])
        at_home = Tasks.build(placement, problem.reach, rows)
        workers = np.arange(placement.num_workers + 1)
        return cls(
            problem=problem,
            cost=cost,
            documents=documents,
            load=documents.load(placement.document, placement.start, placement.stop),
            is_document=is_document,
            home=placement.worker.tolist(),
            document=placement.document.tolist(),
            tasks_at_home=at_home,
            traffic_at_home=traffic(at_home, placement, problem.shape, node),
            several_nodes=bool(np.any(node != node[0])),
            moves_to_keys=np.full((2, len(size)), NOT_LOOKED_AT),
            _first=np.searchsorted(placement.worker, workers).tolist(),
        )

    def with_cost(self, cost: TaskCost) -> PlacedShards:
        """Returns the same shards with the loads of another direction."""
        placement = self.problem.placement
        documents = self.problem.document_loads(cost.ps)
        load = documents.load(placement.document, placement.start, placement.stop)
        return replace(self, cost=cost, documents=documents, load=load)

    def heaviest_first(self, worker: int) -> Ints:
        """Returns the shards of a worker; ranks that only serve have none."""
        if worker + 1 >= len(self._first):
            return self._heaviest_first[:0]
        return self._heaviest_first[self._first[worker] : self._first[worker + 1]]

    @cached_property
    def _heaviest_first(self) -> Ints:
        """[shards] The shards of all workers, the heaviest of each first."""
        return np.lexsort((-self.load, self.problem.placement.worker))

    @cached_property
    def heaviest(self) -> Ints:
        """[workers] The heaviest shard of each worker; of equal ones the first."""
        worker = self.problem.placement.worker
        most = np.full(self.problem.placement.num_workers, -1)
        np.maximum.at(most, worker, self.load)
        shard = np.flatnonzero(self.load == most[worker])[::-1]
        heaviest = np.zeros_like(most)
        heaviest[worker[shard]] = shard  # of shards of one worker, the last one counts
        return heaviest

    @cached_property
    def is_long_document(self) -> Bools:
        """[shards] Whether the shard is a whole causal document of many tiles."""
        placement, many = self.problem.placement, MANY_TILES * self.problem.grain.spacing
        long: Bools = self.problem.masks.is_causal & (placement.lengths >= many)
        return self.is_document & long[placement.document]

    @cached_property
    def shares_keys(self) -> Bools:
        """[shards] Whether other shards of the document need many of the same keys.

        Under a window or chunks that are shorter than the shard, few are needed twice.
        """
        placement = self.problem.placement
        reach = self.problem.masks.reach[placement.document]
        is_near: Bools = (reach != FULL) & (np.abs(reach) <= placement.stop - placement.start)
        return ~self.is_document & ~is_near

    @cached_property
    def least_piece(self) -> Ints:
        """[shards] About the least load that can be cut off: that of the first or the last piece.

        A whole shard that cannot be cut counts as a piece. With many ranks, some server has
        headroom for any piece, and 0 stands for all.
        """
        if self.problem.devices.num_ranks > FEW_RANKS:
            return np.zeros_like(self.load)
        shards = self._all_cuttable
        one, last = np.ones_like(shards.last_cut), shards.last_cut
        first_piece = shards.load(shards.start, shards.position(one))
        last_piece = shards.load(shards.position(last - 1), shards.stop)
        least: Ints = np.minimum(first_piece, last_piece)[:, 0]
        return least

    @cached_property
    def _first_row(self) -> list[int]:
        placement = self.problem.placement
        first = placement.spans.group.searchsorted(np.arange(len(placement.lengths) + 1))
        rows: list[int] = first.tolist()
        return rows

    def span(self, shard: int) -> Span:
        placement = self.problem.placement
        return int(placement.start[shard]), int(placement.stop[shard])

    def same_node(self, rank: int, other: int) -> bool:
        """Returns whether two ranks share a node; always False if there is only one node."""
        node = self.problem.devices.node
        return self.several_nodes and bool(node[rank] == node[other])

    def ranks_of_node(self, rank: int) -> list[int]:
        """Returns all ranks of the node of a rank."""
        node = self.problem.devices.node
        ranks: list[int] = np.flatnonzero(node == node[rank]).tolist()
        return ranks

    def cuttable(self, shards: Sequence[int]) -> CuttableShards:
        """Returns shards with the positions at which they may be cut."""
        return self._all_cuttable.take(as_ints(shards))

    @cached_property
    def _all_cuttable(self) -> CuttableShards:
        placement = self.problem.placement
        return CuttableShards(
            start=placement.start[:, None],
            stop=placement.stop[:, None],
            document=placement.document[:, None],
            masks=self.problem.masks,
            total_load=self.load[:, None],
            cost=self.cost,
            grain=self.problem.grain,
            exact=EXACT if self.problem.devices.num_ranks > FEW_RANKS else 1.0,
        )

    def load_of(self, shard: Ints, start: Ints, stop: Ints) -> Ints:
        """Returns the load of queries [start, stop) of each shard."""
        return self.documents.load(self.problem.placement.document[shard], start, stop)

    def num_keys(self, shard: Ints, start: Ints, stop: Ints) -> Ints:
        """Returns how many keys queries [start, stop) of each shard need."""
        document = self.problem.placement.document[shard]
        return self.problem.masks.num_keys(document, start, stop)

    def keys_needed(self, document: int, queries: Span) -> Span:
        """Returns the keys that some queries of a document need."""
        return self.problem.masks.keys_needed(document, queries)

    def homes(self, document: int) -> KeySpans:
        """Returns the workers on which the document's own tokens live, without its prefix."""
        if document not in self._homes:
            homes: KeySpans = {}
            for shard in self.problem.placement.by_document[self._rows(document)].tolist():
                homes.setdefault(self.home[shard], []).append(self.span(shard))
            self._homes[document] = homes
        return self._homes[document]

    def held_at_home(self, document: int) -> KeySpans:
        """Returns who has the document's own keys before anything moves: their own, or fetched.

        Workers fetch the keys that their shards need, and those of a prefix for continuations.
        """
        if document not in self._held:
            held = self._keys_at_home.of(document)
            self._held[document] = held or self.homes(document)  # a whole document fetches none
        return self._held[document]

    @cached_property
    def _keys_at_home(self) -> KeysOnRanks:
        return KeysOnRanks.of_tasks(self.tasks_at_home, self.problem)

    def homes_of(self, document: int, keys: Span) -> tuple[Ints, Ints]:
        """Returns where some of the document's own tokens live: workers, and how many on each.

        A worker with several shards of the document appears several times.
        """
        placement, (start, stop) = self.problem.placement, keys
        rows, (_, low, high) = self._rows(document), placement.spans
        first = rows.start + int(high[rows].searchsorted(start, side="right"))
        last = rows.start + int(low[rows].searchsorted(stop))
        worker = placement.worker[placement.by_document[first:last]]
        return worker, np.minimum(high[first:last], stop) - np.maximum(low[first:last], start)

    def _rows(self, document: int) -> slice:
        """Returns where the document is in the order of ``Placement.by_document``."""
        return slice(*self._first_row[document : document + 2])

    def owners(self, document: int) -> KeySpans:
        """Returns the workers on which the document's tokens and those of its prefix live."""
        parts = self.all_parts(document)
        if len(parts) == 1:
            return self.homes(document)
        if document not in self._owners:
            self._owners[document] = joined((self.homes(owner), part) for owner, part in parts)
        return self._owners[document]

    def owner_spans(self, document: int) -> tuple[Ints, list[tuple[int, Span]]]:
        """Returns the same one by one: the worker of each span, and each (worker, span)."""
        if document not in self._owner_spans:
            owners = self.owners(document).items()
            found = [(worker, span) for worker, spans in owners for span in spans]
            self._owner_spans[document] = as_ints([worker for worker, _ in found]), found
        return self._owner_spans[document]

    def all_parts(self, document: int) -> list[tuple[int, Span]]:
        """Divides all keys of a document as ``parts`` does; without a prefix there is one part."""
        if document not in self._parts:
            keys = 0, int(self.problem.placement.lengths[document])
            self._parts[document] = self.parts(document, keys)
        return self._parts[document]

    def parts(self, document: int, keys: Span) -> list[tuple[int, Span]]:
        """Divides keys of a document by the document that has them, in order: ancestors first."""
        (length, parent), (start, stop) = self._prefixes, keys
        found = []
        while start < (prefix := length[document]):
            if stop > prefix:
                found.append((document, (prefix, stop)))
            document, stop = parent[document], min(stop, prefix)
        return [(document, (start, stop)), *reversed(found)]

    @cached_property
    def _prefixes(self) -> tuple[list[int], list[int]]:
        """[documents] The length of each prefix, and the parent."""
        prefixes = self.problem.placement.prefixes
        return prefixes.length.tolist(), prefixes.parent.tolist()

    def memory_bytes(self, document: int, queries: Span) -> int:
        """Returns what queries take on another server: q, o, and a packed copy of their keys."""
        first, last = self.keys_needed(document, queries)
        shape = self.problem.shape
        return (queries[1] - queries[0]) * shape.qo_bytes + (last - first) * shape.kv_memory_bytes
