"""The state of one try of the scheduler: loads, traffic, memory, keys held, and the cuts so far."""

import bisect
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from distca.planning.schedulers.cuts import KeySource, Piece, Target
from distca.planning.schedulers.placed_shards import KeySpans, PlacedShards
from distca.planning.spans import Ints, Span, as_ints, num_shared, with_span
from distca.planning.tasks import Tasks

NUM_SOURCES = 4  # owners of a document whose sent bytes limit a cut, the busiest; 2 do as well


class Headroom(NamedTuple):
    """The load that a server can still take. Sorts by load, then by server."""

    load: int
    server: int


class Loads:
    """The load of every rank, and the servers with headroom in sorted order."""

    def __init__(self, per_rank: Ints, capacity: Ints, serving: Sequence[int]) -> None:
        self.per_rank, self.capacity, self._serving = per_rank, capacity, frozenset(serving)
        headrooms = (Headroom(self.headroom(server), server) for server in serving)
        self.headrooms = sorted(headroom for headroom in headrooms if headroom.load > 0)

    def serves(self, rank: int) -> bool:
        return rank in self._serving

    @property
    def above_capacity(self) -> Ints:
        """[ranks] Load minus capacity: positive on ranks with a surplus."""
        return self.per_rank - self.capacity

    def headroom(self, rank: int) -> int:
        """Returns the load that the rank can still take; negative if it has a surplus."""
        return int(self.capacity[rank] - self.per_rank[rank])

    def surplus(self, rank: int) -> int:
        return max(-self.headroom(rank), 0)

    def add(self, rank: int, load: int) -> None:
        """Adds a load, which may be negative, and keeps the servers sorted."""
        index = bisect.bisect_left(self.headrooms, Headroom(self.headroom(rank), rank))
        if index < len(self.headrooms) and self.headrooms[index].server == rank:
            del self.headrooms[index]
        self.per_rank[rank] += load
        if self.headroom(rank) > 0 and self.serves(rank):
            bisect.insort(self.headrooms, Headroom(self.headroom(rank), rank))


class HeldKeys:
    """Spans of keys that ranks have of each document: their own, fetched, or received ones."""

    def __init__(self, shards: PlacedShards) -> None:
        self._shards = shards
        self._held: dict[int, KeySpans] = {}  # document -> who holds its keys

    def holders(self, document: int) -> KeySpans:
        """Returns the ranks that have keys of a document."""
        if document not in self._held:
            owners = self._shards.owners(document)
            held = {rank: list(spans) for rank, spans in owners.items()}
            if len(owners) > 1:  # each worker fetches the keys that its shards need
                for rank, spans in owners.items():
                    for span in spans:
                        need = self._shards.keys_needed(document, span)
                        held[rank] = with_span(held[rank], need)
            self._held[document] = held
        return self._held[document]

    def num_missing(self, document: int, rank: int, need: Span) -> int:
        """Returns how many of the keys ``need`` a rank does not have."""
        return need[1] - need[0] - num_shared(self.holders(document).get(rank, ()), need)

    def add(self, document: int, rank: int, keys: Span) -> list[tuple[int, int]]:
        """Adds keys to a rank; returns how many new ones each owner sends, (owner, number)."""
        holders = self.holders(document)
        before = holders.get(rank, [])
        after = with_span(before, keys)
        holders[rank] = after
        return [
            (owner, sum(num_shared(after, span) - num_shared(before, span) for span in spans))
            for owner, spans in self._shards.owners(document).items()
        ]

    def keep_own(self, document: int, rank: int) -> None:
        """Drops the keys of a worker that do not live there."""
        self.holders(document)[rank] = list(self._shards.owners(document)[rank])


class Ledger:
    """Loads, keys, traffic, memory and pieces of one try, which starts with every shard at home."""

    def __init__(self, shards: PlacedShards, expected_load: int = 0) -> None:
        """expected_load: the total from which capacities are derived; 0: that of uncut shards."""
        problem, traffic = shards.problem, shards.traffic_at_home
        placement, devices, shape = problem.placement, problem.devices, problem.shape
        self.problem, self.shards = problem, shards
        self.keys = HeldKeys(shards)
        load = np.zeros(devices.num_ranks, np.int64)
        np.add.at(load, placement.worker, shards.load)
        capacity = devices.capacity(expected_load or int(load.sum()), problem.tolerance)
        self.loads = Loads(load, capacity, devices.serving.tolist())
        self.sent, self.received = traffic.send.copy(), traffic.recv.copy()
        self.free_bytes = devices.memory_bytes - traffic.recv
        token_bytes = 2 * shape.q_bytes + shape.kv_bytes
        self.free_bytes[: placement.num_workers] -= placement.tokens * token_bytes
        self._pieces: dict[int, list[Piece]] = {}  # shard -> all its pieces, if it was cut
        self._server = placement.worker.copy()  # [shards] of those that were not cut
        self._moved = np.zeros(len(placement.worker), bool)  # [shards] whole or in pieces

    @property
    def peak_traffic(self) -> int:
        """The most bytes that any rank sends or receives so far."""
        return int(max(self.sent.max(), self.received.max()))

    @property
    def total_traffic(self) -> int:
        return int(self.sent.sum())

    def is_cut(self, shard: int) -> bool:
        """Returns whether the shard, or some of its queries, was moved."""
        return bool(self._moved[shard])

    def uncut(self, worker: int) -> Ints:
        """Returns the shards of a worker of which nothing was moved, the heaviest first."""
        shards = self.shards.heaviest_first[worker]
        return shards[~self._moved[shards]]

    def target(self, shard: int, headroom: Headroom) -> Target:
        """Describes a server that may take a piece of the shard."""
        server = headroom.server
        return Target(
            server=server,
            headroom=headroom.load,
            free_bytes=int(self.free_bytes[server]),
            received=int(self.received[server]),
            same_node=self.shards.same_node(server, self.shards.home[shard]),
            held=self.keys.holders(self.shards.document[shard]).get(server, ()),
        )

    def sources(self, shard: int) -> list[KeySource]:
        """Describes the shard's home and the other owners of the document that send the most."""
        shards, home, own = self.shards, self.shards.home[shard], self.shards.span(shard)
        others = [
            KeySource(rank, span, int(self.sent[rank]), shards.same_node(rank, home))
            for rank, spans in shards.owners(shards.document[shard]).items()
            for span in spans
            if (rank, span) != (home, own)
        ]
        busiest = sorted(others, key=lambda source: -source.sent)[: NUM_SOURCES - 1]
        return [KeySource(home, own, int(self.sent[home]), same_node=True), *busiest]

    def move(self, shard: int, pieces: list[Piece]) -> None:
        """Moves pieces of a shard to their servers; the rest of the shard stays at home."""
        shards, home, document = self.shards, self.shards.home[shard], self.shards.document[shard]
        kept = self._rest(shard, pieces)
        for piece in pieces:
            q_bytes = (piece.stop - piece.start) * self.problem.shape.q_bytes
            self._send(home, piece.server, q_bytes)  # q
            self._send(piece.server, home, q_bytes)  # o
            need = shards.keys_needed(document, piece.span)
            for owner, num_keys in self.keys.add(document, piece.server, need):
                self._send(owner, piece.server, num_keys * self.problem.shape.kv_bytes)
            self.free_bytes[piece.server] -= shards.memory_bytes(document, piece.span)
            self.loads.add(piece.server, piece.load)
        if not kept and len(shards.owners(document)) > 1:
            self._stop_fetching(shard)
        self._pieces[shard], self._moved[shard] = [*pieces, *kept], True
        self.loads.add(home, sum(piece.load for piece in kept) - int(shards.load[shard]))

    def move_documents(self, documents: Ints, server: Ints) -> None:
        """Moves many shards at once that are whole documents, each to its server."""
        placement, shape = self.problem.placement, self.problem.shape
        home, tokens = placement.worker[documents], placement.stop[documents]
        for source, target, token_bytes in (
            (home, server, shape.q_bytes + shape.kv_bytes),  # q, k and v
            (server, home, shape.q_bytes),  # o
        ):
            np.add.at(self.sent, source, tokens * token_bytes)
            np.add.at(self.received, target, tokens * token_bytes)
        np.subtract.at(self.free_bytes, server, self.memory_of_documents(documents))
        change = np.zeros(self.problem.devices.num_ranks, np.int64)
        np.add.at(change, server, self.shards.load[documents])
        np.subtract.at(change, home, self.shards.load[documents])
        for rank in np.flatnonzero(change).tolist():
            self.loads.add(rank, int(change[rank]))
        self._server[documents], self._moved[documents] = server, True

    def memory_of_documents(self, documents: Ints) -> Ints:
        """[documents] Returns what shards that are whole documents take on another server."""
        shape = self.problem.shape
        return self.problem.placement.stop[documents] * (2 * shape.q_bytes + shape.kv_bytes)

    def _rest(self, shard: int, pieces: list[Piece]) -> list[Piece]:
        """Returns what is left of a shard as pieces at home."""
        home, (position, stop) = self.shards.home[shard], self.shards.span(shard)
        spans = []
        for piece in [*sorted(pieces), Piece(stop, stop, home, 0)]:
            if position < piece.start:
                spans.append((position, piece.start))
            position = piece.stop
        if not spans:
            return []
        loads = self.shards.cuttable(shard).load(*as_ints(spans).T).tolist()
        return [Piece(*span, home, load) for span, load in zip(spans, loads, strict=True)]

    def _stop_fetching(self, shard: int) -> None:
        """Removes the keys that home fetched for a shard of which it computes nothing any more."""
        home, document = self.shards.home[shard], self.shards.document[shard]
        need = self.shards.keys_needed(document, self.shards.span(shard))
        for owner, spans in self.shards.owners(document).items():
            if owner != home:
                fetched = num_shared(spans, need) * self.problem.shape.kv_bytes
                self._send(owner, home, -fetched)
                self.free_bytes[home] += fetched
        self.keys.keep_own(document, home)

    def _send(self, source: int, target: int, num_bytes: int) -> None:
        self.sent[source] += num_bytes
        self.received[target] += num_bytes

    def tasks(self) -> Tasks:
        """Returns the tasks of all shards, cut and uncut."""
        p = self.problem.placement
        cut = [
            (shard, piece.start, piece.stop, piece.server)
            for shard, pieces in self._pieces.items()
            for piece in pieces
        ]
        uncut = np.delete(np.arange(len(p.document)), list(self._pieces))
        whole = np.stack([uncut, p.start[uncut], p.stop[uncut], self._server[uncut]])
        rows = np.concatenate([whole, as_ints(cut).reshape(-1, 4).T], axis=1)
        return Tasks.build(p, self.problem.reach, rows)
