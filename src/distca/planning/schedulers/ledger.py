"""The state of one scheduling: loads, rooms, ports, memory, keys held, and the cuts so far."""

from __future__ import annotations

import bisect
from itertools import pairwise

import numpy as np

from distca.planning import masks
from distca.planning.problem import Price, Problem
from distca.planning.schedulers.cuts import Divisible, Piece, Source, Target
from distca.planning.spans import as_ints
from distca.planning.tasks import Tasks
from distca.planning.traffic import forward_traffic

NUM_SOURCES = 4  # holders of a document's keys whose ports are watched

Room = tuple[int, int]  # (picoseconds, server)
Span = tuple[int, int]
Keys = dict[int, list[Span]]  # rank -> disjoint spans of one document's keys


class Ledger:
    """Starts with every shard at home; ``take`` moves pieces of one and books what they change."""

    def __init__(self, problem: Problem, price: Price, total_work: int = 0) -> None:
        placement, servers, shape = problem.placement, problem.devices, problem.shape
        self.problem, self.price = problem, price
        self.placement, self.devices, self.shape = placement, servers, shape
        documents = problem.priced_documents(price)
        self.loads = documents.load(placement.document, placement.start, placement.stop)
        self.work = np.zeros(servers.num_ranks, np.int64)
        np.add.at(self.work, placement.worker, self.loads)
        self.capacity = servers.capacity(total_work or int(self.work.sum()), problem.tolerance)
        self.rooms: list[Room] = sorted(
            (self.room(server), server)
            for server in servers.serving.tolist()
            if self.room(server) > 0
        )
        traffic = forward_traffic(
            Tasks.at_home(placement, problem.reach), placement, shape, servers.node
        )
        self.sent, self.received = traffic.send.copy(), traffic.recv.copy()
        self.free_bytes = servers.memory_bytes - traffic.recv
        weight = 2 * shape.q_bytes + shape.kv_bytes
        self.free_bytes[: placement.num_workers] -= placement.tokens * weight
        self.several_nodes = bool(np.any(servers.node != servers.node[0]))
        self.cuts: dict[int, list[Piece]] = {}  # shard -> what became of it
        self._lengths: list[int] = placement.lengths.tolist()
        self._reach: list[int] = problem.reach.tolist()
        self._keys: dict[int, Keys] = {}  # document -> where its keys are
        self._divisible: dict[int, Divisible] = {}
        shards_by_load = np.lexsort((-self.loads, placement.worker))
        ends = np.searchsorted(
            placement.worker[shards_by_load], np.arange(placement.num_workers + 1)
        )
        self.heaviest = [shards_by_load[a:b].tolist() for a, b in pairwise(ends.tolist())]
        self._shards_of = np.searchsorted(
            placement.spans.group, np.arange(placement.num_documents + 1)
        ).tolist()

    # -- looking up ----------------------------------------------------------------------------

    def room(self, server: int) -> int:
        return int(self.capacity[server] - self.work[server])

    def surplus(self, rank: int) -> int:
        return max(-self.room(rank), 0)

    @property
    def port_limit(self) -> int:
        """The busiest port so far: what later choices should not pass."""
        return int(max(self.sent.max(), self.received.max()))

    def near(self, rank: int, other: int) -> bool:
        """Whether two ranks share a node, where there are several."""
        return self.several_nodes and bool(self.devices.node[rank] == self.devices.node[other])

    def span(self, shard: int) -> Span:
        return int(self.placement.start[shard]), int(self.placement.stop[shard])

    def home(self, shard: int) -> int:
        return int(self.placement.worker[shard])

    def document(self, shard: int) -> int:
        return int(self.placement.document[shard])

    def divisible(self, shard: int) -> Divisible:
        if shard not in self._divisible:
            document = self.document(shard)
            self._divisible[shard] = Divisible.of(
                *self.span(shard),
                self._lengths[document],
                self._reach[document],
                self.price,
                self.problem.grain,
            )
        return self._divisible[shard]

    def needs(self, document: int, queries: Span) -> Span:
        """The keys that some queries of a document need."""
        return masks.keys_needed(queries, self._lengths[document], self._reach[document])

    def owners(self, document: int) -> Keys:
        """Where the document's tokens live."""
        owners: Keys = {}
        first, last = self._shards_of[document : document + 2]
        for shard in self.placement.by_document[first:last].tolist():
            owners.setdefault(self.home(shard), []).append(self.span(shard))
        return owners

    def holders(self, document: int) -> Keys:
        """Where the document's keys are: their homes, and ranks that fetch or were sent them."""
        if document not in self._keys:
            keys = self.owners(document)
            if len(keys) > 1:
                for rank, spans in keys.items():
                    for span in list(spans):
                        keys[rank] = add(keys[rank], self.needs(document, span))
            self._keys[document] = keys
        return self._keys[document]

    def target(self, shard: int, room: int, server: int) -> Target:
        return Target(
            server=server,
            room=room,
            free_bytes=int(self.free_bytes[server]),
            received=int(self.received[server]),
            near=self.near(server, self.home(shard)),
            held=self.holders(self.document(shard)).get(server, ()),
        )

    def sources(self, shard: int) -> list[Source]:
        """The shard's home, then the other holders of its document with the busiest ports."""
        home, own = self.home(shard), self.span(shard)
        others = [
            Source(rank, *span, int(self.sent[rank]), self.near(rank, home))
            for rank, spans in self.owners(self.document(shard)).items()
            for span in spans
            if (rank, span) != (home, own)
        ]
        busiest = sorted(others, key=lambda source: -source.sent)[: NUM_SOURCES - 1]
        return [Source(home, *own, int(self.sent[home]), near=True), *busiest]

    def arriving_bytes(self, document: int, piece: Piece) -> int:
        """Queries, and the keys that are not on the server yet."""
        need = self.needs(document, piece[:2])
        keys = need[1] - need[0] - common(self.holders(document).get(piece.server, []), need)
        return (piece.stop - piece.start) * self.shape.q_bytes + keys * self.shape.kv_bytes

    def weight_bytes(self, document: int, piece: Piece) -> int:
        """Memory that a piece takes on its server: q, o, and a packed copy of its keys."""
        need = self.needs(document, piece[:2])
        queries = (piece.stop - piece.start) * self.shape.q_bytes
        return 2 * queries + (need[1] - need[0]) * self.shape.kv_bytes

    # -- moving --------------------------------------------------------------------------------

    def take(self, shard: int, pieces: list[Piece]) -> None:
        """Moves pieces of a shard to their servers; what is left stays at home."""
        home, document = self.home(shard), self.document(shard)
        kept = self._kept(shard, pieces)
        holders, owners = self.holders(document), self.owners(document)
        for piece in pieces:
            queries = (piece.stop - piece.start) * self.shape.q_bytes
            for sender, receiver in ((home, piece.server), (piece.server, home)):
                self.sent[sender] += queries
                self.received[receiver] += queries
            before = holders.get(piece.server, [])
            after = add(before, self.needs(document, piece[:2]))
            for owner, spans in owners.items():
                keys = sum(common(after, span) - common(before, span) for span in spans)
                self.sent[owner] += keys * self.shape.kv_bytes
                self.received[piece.server] += keys * self.shape.kv_bytes
            holders[piece.server] = after
            self.free_bytes[piece.server] -= self.weight_bytes(document, piece)
            self._set_work(piece.server, int(self.work[piece.server]) + piece.load)
        if not kept and len(owners) > 1:
            self._stop_fetching(shard, owners)
        self.cuts[shard] = [*pieces, *kept]
        left = sum(piece.load for piece in kept)
        self._set_work(home, int(self.work[home]) - int(self.loads[shard]) + left)

    def _kept(self, shard: int, pieces: list[Piece]) -> list[Piece]:
        home, (position, stop) = self.home(shard), self.span(shard)
        spans = []
        for piece in [*sorted(pieces), Piece(stop, stop, home, 0)]:
            if position < piece.start:
                spans.append((position, piece.start))
            position = piece.stop
        if not spans:
            return []
        loads = self.divisible(shard).load(*as_ints(spans).T).tolist()
        return [Piece(*span, home, load) for span, load in zip(spans, loads, strict=True)]

    def _stop_fetching(self, shard: int, owners: Keys) -> None:
        """Home computes nothing of the shard any more, so it fetches no keys for it."""
        home, document = self.home(shard), self.document(shard)
        need = self.needs(document, self.span(shard))
        for owner, spans in owners.items():
            if owner != home:
                keys = common(spans, need) * self.shape.kv_bytes
                self.sent[owner] -= keys
                self.received[home] -= keys
                self.free_bytes[home] += keys
        self.holders(document)[home] = owners[home]

    def _set_work(self, server: int, work: int) -> None:
        index = bisect.bisect_left(self.rooms, (self.room(server), server))
        if index < len(self.rooms) and self.rooms[index][1] == server:
            del self.rooms[index]
        self.work[server] = work
        if self.room(server) > 0 and self.devices.speed[server] > 0:
            bisect.insort(self.rooms, (self.room(server), server))

    def tasks(self) -> Tasks:
        placement = self.placement
        rows = [
            (shard, piece.start, piece.stop, piece.server)
            for shard, pieces in self.cuts.items()
            for piece in pieces
        ]
        table = as_ints(rows).reshape(-1, 4)
        uncut = np.ones(len(placement.document), dtype=bool)
        uncut[table[:, 0]] = False
        whole = np.flatnonzero(uncut)
        return Tasks.build(
            placement,
            self.problem.reach,
            np.concatenate([whole, table[:, 0]]),
            np.concatenate([placement.start[whole], table[:, 1]]),
            np.concatenate([placement.stop[whole], table[:, 2]]),
            np.concatenate([placement.worker[whole], table[:, 3]]),
        )


def common(spans: list[Span], other: Span) -> int:
    """Tokens that disjoint spans share with another span."""
    return sum(max(min(stop, other[1]) - max(start, other[0]), 0) for start, stop in spans)


def add(spans: list[Span], other: Span) -> list[Span]:
    """Disjoint spans with another one added."""
    start, stop = other
    apart = []
    for low, high in spans:
        if high < start or low > stop:
            apart.append((low, high))
        else:
            start, stop = min(start, low), max(stop, high)
    return sorted([*apart, (start, stop)])
