"""The state of one try of the scheduler: loads, traffic, memory, keys held, and the cuts so far."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import partial

import numpy as np

from distca.planning.schedulers.cuts import Piece
from distca.planning.schedulers.held_keys import HeldKeys
from distca.planning.schedulers.key_spans import KeysOnRanks
from distca.planning.schedulers.loads import Loads
from distca.planning.schedulers.placed_shards import PlacedShards
from distca.planning.spans import Bools, Ints, as_ints
from distca.planning.tasks import Tasks
from distca.planning.traffic import traffic

MARGIN = 0.002  # by which estimates of the load are lowered: a tenth of the default tolerance


class Ledger:
    """Loads, keys, traffic, memory and pieces of one try, which starts with every shard at home."""

    def __init__(
        self, shards: PlacedShards, expected_load: int = 0, *, follows_load: bool = False
    ) -> None:
        """Derives capacities from an estimate of the total load after cutting.

        expected_load: the estimate; 0: the load of uncut shards.
        follows_load: whether capacities rise once cuts have raised the load above the estimate.
        """
        problem, traffic = shards.problem, shards.traffic_at_home
        placement, devices, shape = problem.placement, problem.devices, problem.shape
        self.problem, self.shards = problem, shards
        self.keys = HeldKeys(shards)
        load = np.zeros(devices.num_ranks, np.int64)
        np.add.at(load, placement.worker, shards.load)
        total_load = int(load.sum())
        self._follows_load = follows_load
        self._expected_load = max(expected_load, self._less_margin(total_load))
        capacity = devices.capacity(expected_load or total_load, problem.tolerance)
        self.loads = Loads(load, capacity, devices.serving)
        self.sent, self.received = traffic.send.copy(), traffic.recv.copy()
        fetched = traffic.recv // shape.kv_bytes  # keys are all that is received at home
        self.free_bytes = devices.memory_bytes - fetched * shape.kv_memory_bytes
        self.free_bytes[: placement.num_workers] -= placement.tokens * shape.token_bytes
        self._pieces: list[Ints] = []  # [4, pieces] of shards that were cut, as in ``Tasks.build``
        self.server = placement.worker.copy()  # [shards] of those that were not cut
        self._moved = np.zeros(len(placement.worker), bool)  # [shards] whole or in pieces
        self._uncut: dict[int, Ints] = {}  # worker -> its shards that are left, if asked for

    def copy(self) -> Ledger:
        """Returns a ledger in the same state, which then changes on its own."""
        other = copy(self)
        other.keys, other.loads = self.keys.copy(), self.loads.copy()
        other.sent, other.received = self.sent.copy(), self.received.copy()
        other.free_bytes, other._pieces = self.free_bytes.copy(), list(self._pieces)
        other.server, other._moved = self.server.copy(), self._moved.copy()
        other._uncut = dict(self._uncut)
        return other

    @property
    def moved(self) -> int:
        """What orders are compared by: peak traffic x total traffic."""
        return self.peak_traffic * self.total_traffic

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
        if worker not in self._uncut:
            self._uncut[worker] = self.unmoved(self.shards.heaviest_first(worker))
        return self._uncut[worker]

    def is_dedicated(self, rank: int) -> bool:
        """Returns whether a rank serves only."""
        return rank >= self.problem.placement.num_workers

    def unmoved(self, shards: Ints) -> Ints:
        """Returns those shards of which nothing was moved."""
        return shards[~self._moved[shards]]

    def _mark_moved(self, shards: Ints) -> None:
        self._moved[shards] = True
        for worker in set(self.problem.placement.worker[shards].tolist()):
            self._uncut.pop(worker, None)

    def move(self, moves: Sequence[tuple[int, list[Piece]]]) -> None:
        """Moves pieces of shards to their servers; the rest of each shard stays at home.

        moves: (shard, pieces), each shard once.
        """
        if not moves:
            return
        shards, placement, shape = self.shards, self.problem.placement, self.problem.shape
        leaving = [(shard, *piece) for shard, pieces in moves for piece in pieces]
        shard, start, stop, server, load = as_ints(leaving).T
        home = placement.worker[shard]
        num_queries, num_keys = stop - start, shards.num_keys(shard, start, stop)
        self._send(home, server, num_queries * shape.q_bytes)
        self._send(server, home, num_queries * shape.o_bytes)
        held = num_queries * shape.qo_bytes + num_keys * shape.kv_memory_bytes
        np.subtract.at(self.free_bytes, server, held)
        kept = self._rest(moves)
        whole = shards.is_document[shard]
        self._send(home[whole], server[whole], (num_keys * shape.kv_bytes)[whole])
        keeps = set(kept[0].tolist())
        for number, pieces in moves:
            if not shards.is_document[number]:
                self._send_keys(number, pieces, keeps_some=number in keeps)
        self._pieces += [np.stack([shard, start, stop, server]), kept[:4]]
        moved = as_ints([number for number, _ in moves])
        self._mark_moved(moved)
        self.loads.add(
            np.concatenate([server, kept[3], placement.worker[moved]]),
            np.concatenate([load, kept[4], -shards.load[moved]]),
        )
        self._follow_load()

    def _follow_load(self) -> None:
        """Raises capacities if cuts have raised the load, and with it the mean, above the estimate.

        A capacity is never lowered, because ranks were filled up to it.
        """
        load = self._less_margin(int(self.loads.per_rank.sum()))
        if self._follows_load and load > self._expected_load:
            self._expected_load = load
            self.loads.set_capacity(self.problem.devices.capacity(load, self.problem.tolerance))

    @staticmethod
    def _less_margin(load: int) -> int:
        return int(load * (1.0 - MARGIN))  # later cuts may lower the load a little

    def _send_keys(self, shard: int, pieces: Sequence[Piece], *, keeps_some: bool) -> None:
        """Sends the keys that pieces need and their servers do not hold."""
        document, kv_bytes = self.shards.document[shard], self.problem.shape.kv_bytes
        for piece in pieces:
            need = self.shards.keys_needed(document, piece.span)
            for owners, num_keys in self.keys.add(document, piece.server, need):
                np.add.at(self.sent, owners, num_keys * kv_bytes)
                self.received[piece.server] += int(num_keys.sum()) * kv_bytes
        if not keeps_some and len(self.shards.owners(document)) > 1:
            self._stop_fetching(shard)

    def move_whole(self, shard: int, server: int) -> None:
        """Moves one shard as a whole, in a tenth of the time that ``move`` takes for it."""
        shards, shape = self.shards, self.problem.shape
        home, document, queries = shards.home[shard], shards.document[shard], shards.span(shard)
        num_queries, load = queries[1] - queries[0], int(shards.load[shard])
        self.sent[home] += num_queries * shape.q_bytes
        self.received[server] += num_queries * shape.q_bytes
        self.sent[server] += num_queries * shape.o_bytes
        self.received[home] += num_queries * shape.o_bytes
        self.free_bytes[server] -= shards.memory_bytes(document, queries)
        self._send_keys(shard, [Piece(*queries, server, load)], keeps_some=False)
        self.loads.move(load, home, server)
        self.server[shard], self._moved[shard] = server, True
        self._uncut.pop(home, None)

    def send_to_keys(self, shards: Ints, server: Ints) -> None:
        """Moves shards as a whole, none of which is a document, and counts what is sent for all.

        The caller has moved their loads and memory, one by one, since these decide what moves.
        """
        problem, placement = self.problem, self.problem.placement
        count = partial(
            traffic, placement=placement, shape=problem.shape, node=problem.devices.node
        )
        among, before = ~self.shards.is_document, None
        if not self._moved[among].any():
            before = self.shards.traffic_at_home
            documents = among & np.isin(placement.document, placement.document[shards])
            # The others' keys stay where they are, unless they are prefixes of these.
            if not placement.prefixes.exist and 2 * documents.sum() < among.sum():
                among, before = documents, None
        if before is None:
            before = count(self.tasks(among))
        self.server[shards] = server
        self._mark_moved(shards)
        tasks = self.tasks(among)
        after = count(tasks)
        self.sent += after.send - before.send
        self.received += after.recv - before.recv
        self.keys = HeldKeys(self.shards, KeysOnRanks.of_tasks(tasks, problem))

    def move_documents(self, documents: Ints, server: Ints) -> None:
        """Moves many shards at once that are whole documents, each to its server."""
        placement, shape = self.problem.placement, self.problem.shape
        home, tokens = placement.worker[documents], placement.stop[documents]
        self._send(home, server, tokens * (shape.q_bytes + shape.kv_bytes))
        self._send(server, home, tokens * shape.o_bytes)
        np.subtract.at(self.free_bytes, server, self.memory_of_documents(documents))
        load = self.shards.load[documents]
        self.loads.add(np.concatenate([server, home]), np.concatenate([load, -load]))
        self.server[documents] = server
        self._mark_moved(documents)

    def memory_of_documents(self, documents: Ints) -> Ints:
        """[documents] Returns what shards that are whole documents take on another server."""
        return self.problem.placement.stop[documents] * self.problem.shape.token_bytes

    def _rest(self, moves: Sequence[tuple[int, list[Piece]]]) -> Ints:
        """[5, pieces] Returns what is left of shards at home: shard, start, stop, home and load."""
        shards = self.shards
        rest = []
        for shard, pieces in moves:
            home, (position, end) = shards.home[shard], shards.span(shard)
            for start, stop in [*sorted(piece.span for piece in pieces), (end, end)]:
                if position < start:
                    rest.append((shard, position, start, home))
                position = stop
        rows = as_ints(rest).reshape(-1, 4).T
        return np.concatenate([rows, [shards.load_of(*rows[:3])]])

    def _stop_fetching(self, shard: int) -> None:
        """Removes the keys that home fetched for a shard of which it computes nothing any more."""
        home, document = self.shards.home[shard], self.shards.document[shard]
        need, shape = self.shards.keys_needed(document, self.shards.span(shard)), self.problem.shape
        owners, num_keys = self.shards.homes_of(document, need)
        num_keys = num_keys * (owners != home)
        num_fetched = int(num_keys.sum())
        np.subtract.at(self.sent, owners, num_keys * shape.kv_bytes)
        self.received[home] -= num_fetched * shape.kv_bytes
        self.free_bytes[home] += num_fetched * shape.kv_memory_bytes
        self.keys.keep_own(document, home)

    def _send(self, source: Ints, target: Ints, num_bytes: Ints) -> None:
        np.add.at(self.sent, source, num_bytes)
        np.add.at(self.received, target, num_bytes)

    def tasks(self, among: Bools | None = None) -> Tasks:
        """Returns the tasks of all shards, cut and uncut, or of some of them."""
        p = self.problem.placement
        pieces = np.concatenate([as_ints([[]] * 4), *self._pieces], axis=1)
        is_uncut = np.ones(len(p.document), bool) if among is None else among.copy()
        is_uncut[pieces[0]] = False
        uncut = np.flatnonzero(is_uncut)
        if among is not None:
            pieces = pieces[:, among[pieces[0]]]
        whole = np.stack([uncut, p.start[uncut], p.stop[uncut], self.server[uncut]])
        return Tasks.build(p, self.problem.reach, np.concatenate([whole, pieces], axis=1))
