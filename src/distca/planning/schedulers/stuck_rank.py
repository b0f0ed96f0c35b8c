"""Steps of several moves at once, for a slow rank that no single move helps.

No piece of such a rank is as small as the headroom of any other. So a rank *makes room* for a
piece: it passes tasks on to others. Or it gives one of its tasks to the slow rank in *exchange*.
"""

import bisect
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from distca.planning.devices import UNLIMITED
from distca.planning.problem import DocumentLoads, Problem
from distca.planning.schedulers.single_moves import Move, Pieces, fits, moved_bytes
from distca.planning.spans import Ints

NUM_BACK = 512  # longest tasks of other ranks, of which the slow one may get one in exchange
NUM_ROOMS = 32  # largest headrooms, of ranks that make room or that tasks are passed on to


@dataclass(frozen=True, eq=False)
class StuckRank:
    """The slowest rank, which has no single move."""

    problem: Problem
    documents: DocumentLoads
    rank: int
    pieces: Pieces  # that could leave it
    rows: Ints  # [4, tasks] as in ``Tasks.build``
    load: Ints  # [ranks]
    latest: float  # the finishing time of the bound

    def moves(self) -> list[Move]:
        """Returns moves that lower its finishing time together; none if there are none."""
        return self._make_room() or self._exchange()

    @cached_property
    def _capacity(self) -> Ints:
        return self.problem.devices.capacity(int(self.load.sum()), self.problem.tolerance)

    @cached_property
    def _roomy(self) -> Ints:
        """The ranks with the largest headrooms, these first."""
        serving = self.problem.devices.serving
        serving = serving[serving != self.rank]
        lacking = (self.load - self._capacity)[serving]
        roomy: Ints = serving[np.argsort(lacking, kind="stable")[:NUM_ROOMS]]
        return roomy

    @cached_property
    def _tasks(self) -> Ints:
        """The rows of the tasks of these ranks."""
        return np.flatnonzero(np.isin(self.rows[3], self._roomy))

    @cached_property
    def _task_load(self) -> Ints:
        """[tasks]"""
        shard, start, stop, _ = self.rows[:, self._tasks]
        return self.documents.load(self.problem.placement.document[shard], start, stop)

    def _make_room(self) -> list[Move]:
        """Returns the move of a piece, and those of tasks that leave its server for it.

        The piece is the lightest one after which the slowest rank is within the bound, or of all.
        All other ranks are within it.
        """
        problem, rows, load, worst = self.problem, self.rows, self.load, self.rank
        pieces, capacity, largest = self.pieces, self._capacity, self._roomy.tolist()
        headroom = capacity - load
        stays_above = load[worst] - pieces.freed_load > capacity[worst]
        useful = np.flatnonzero(pieces.freed_load > 0)
        if not len(useful):
            return []
        piece = int(useful[np.lexsort((pieces.added_load[useful], stays_above[useful]))[0]])
        tasks: dict[int, list[tuple[int, int]]] = {server: [] for server in largest}
        columns = rows[3, self._tasks], self._task_load, self._tasks
        for server, of_task, row in zip(*(one.tolist() for one in columns), strict=True):
            tasks[server].append((of_task, row))
        rooms = list(zip(headroom[self._roomy].tolist(), largest, strict=True))
        for room, server in rooms:
            others = (one for one in rooms if one[1] != server)
            passed_on = _pass_on(
                sorted(tasks[server]), int(pieces.added_load[piece]) - room, others
            )
            moves = [pieces.move(piece, server)] if passed_on else []
            for moving, task, other in passed_on:
                low, high = rows[1:3, task].tolist()
                moves.append(Move(task, low, high, other, added_load=moving, freed_load=moving))
            if moves and all(fits(problem, rows, move) for move in moves):
                return moves
        return []

    def _exchange(self) -> list[Move]:
        """Returns the moves of a piece, and of a task of its server that comes back for it.

        Of all pairs, it is the one after which the later of the two ranks finishes earliest; of
        those that keep both within the bound, the one with the fewest bytes.
        """
        problem, rows, load, worst = self.problem, self.rows, self.load, self.rank
        pieces, devices = self.pieces, problem.devices
        longest = np.argsort((rows[1] - rows[2])[self._tasks], kind="stable")[:NUM_BACK]
        row, back = self._tasks[longest], self._task_load[longest]
        if not len(row) or not len(pieces.row):
            return []
        shard, start, stop, server = rows[:, row]
        document = problem.placement.document[shard]
        added, freed = pieces.added_load[:, None], pieces.freed_load[:, None]
        later = np.maximum(
            devices.finish_ps(load[worst] - freed + back, worst),
            devices.finish_ps(load[server] + added - back, server),
        )
        until = np.maximum(later, self.latest)
        home = problem.placement.worker
        leaving = moved_bytes(problem, pieces.document, pieces.low, pieces.high)[:, None]
        moved = leaving * _more_away(home[rows[0, pieces.row]][:, None], worst, server)
        moved += moved_bytes(problem, document, start, stop) * _more_away(
            home[shard], server, worst
        )
        cheapest = np.where(until == until.min(), moved, UNLIMITED).argmin()
        piece, task = divmod(int(cheapest), len(row))
        if later[piece, task] >= devices.finish_ps(load)[worst]:
            return []
        returning, low, high, moving = (int(one[task]) for one in (row, start, stop, back))
        moves = [
            pieces.move(piece, int(server[task])),
            Move(returning, low, high, worst, added_load=moving, freed_load=moving),
        ]
        return moves if all(fits(problem, rows, move) for move in moves) else []


def _more_away(home: Ints, before: Ints | int, after: Ints | int) -> Ints:
    """Returns 1 for moves away from home, -1 for those back home, and 0 for all others."""
    more: Ints = np.not_equal(after, home).astype(np.int64) - np.not_equal(before, home)
    return more


def _pass_on(
    tasks: list[tuple[int, int]], load: int, rooms: Iterable[tuple[int, int]]
) -> list[tuple[int, int, int]]:
    """Returns (load, row, server) of tasks that have a load together; none if there are too few.

    tasks: (load, row), the lightest first.
    rooms: (headroom, server), the largest first. Each takes one task.
    """
    chosen = []
    for headroom, server in rooms:
        last = bisect.bisect_left(tasks, (headroom + 1, -1))
        if not last:
            return []
        enough = bisect.bisect_left(tasks, (load, -1), hi=last)
        moving, row = tasks.pop(min(enough, last - 1))
        chosen.append((moving, row, server))
        load -= moving
        if load <= 0:
            return chosen
    return []
