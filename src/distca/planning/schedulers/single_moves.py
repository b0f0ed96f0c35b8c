"""Single moves: the best one away from each of some slow ranks.

A move takes a whole task of a slow rank, or cuts it at one end, to the rank that finishes first, or
to a faster one that finishes later. The moves of all slow ranks are compared at once, since numpy
takes little longer for those of dozens of ranks than for those of one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from distca.planning.devices import UNLIMITED, Devices
from distca.planning.problem import DocumentLoads, Grain, Problem
from distca.planning.spans import Bools, Floats, Ints, as_ints, expand
from distca.planning.tasks import Tasks
from distca.planning.traffic import memory_bytes

NUM_TASKS = 256  # longest tasks of a slow rank, and best moves, that are looked at
NUM_CUTS = 1024  # of these tasks that are looked at; if there are more, every second or third, ...
ALL_CUTS = 4096  # of the tasks of all slow ranks together


class Move(NamedTuple):
    """Queries [low, high) of the task in one row go to another server."""

    row: int
    low: int
    high: int
    server: int
    added_load: int  # of the server
    freed_load: int  # of the rank that they leave: cuts make this less than what the server gets


@dataclass(frozen=True, eq=False)
class Pieces:
    """What could leave slow ranks: whole tasks, and heads and tails at every possible cut."""

    leaves: Ints  # [pieces] which of the slow ranks; all pieces of one are neighbours
    row: Ints  # [pieces], as all the others
    document: Ints
    low: Ints
    high: Ints
    added_load: Ints
    freed_load: Ints

    def take(self, rows: Ints | slice) -> Pieces:
        return Pieces(*(column[rows] for column in vars(self).values()))

    def of_slowest(self) -> Pieces:
        """Returns those that leave the first rank."""
        return self.take(slice(int(self.leaves.searchsorted(1))))

    def moves(self, piece: Ints, server: Ints) -> list[Move]:
        """Returns the moves of some of them, each to its server."""
        row, low, high = self.row[piece], self.low[piece], self.high[piece]
        columns = (row, low, high, server, self.added_load[piece], self.freed_load[piece])
        return list(map(Move, *(column.tolist() for column in columns)))

    def move(self, piece: int, server: int) -> Move:
        """Returns the move of one of them."""
        return self.moves(as_ints([piece]), as_ints([server]))[0]


def pieces_of(problem: Problem, documents: DocumentLoads, rows: Ints, ranks: Ints) -> Pieces:
    """Returns the pieces that could leave some ranks.

    rows: [4, tasks] as in ``Tasks.build``.
    """
    number = np.full(problem.devices.num_ranks, -1)
    number[ranks] = np.arange(len(ranks))
    mine = np.flatnonzero((number >= 0)[rows[3]])
    leaves, size = number[rows[3, mine]], rows[2, mine] - rows[1, mine]
    # One key orders them in half the time of two.
    order = np.argsort(leaves * (size.max(initial=0) + 1) - size, kind="stable")
    mine, leaves = mine[order], leaves[order]
    is_long = np.arange(len(mine)) - leaves.searchsorted(leaves) < NUM_TASKS
    mine, leaves = mine[is_long], leaves[is_long]
    start, stop, document = rows[1, mine], rows[2, mine], problem.placement.document[rows[0, mine]]
    cut_task, cut = _possible_cuts(problem.grain, start, stop, leaves)
    task = np.concatenate([np.arange(len(mine)), cut_task, cut_task])
    low = np.concatenate([start, start[cut_task], cut])
    high = np.concatenate([stop, cut, stop[cut_task]])
    load = documents.load(document[task], low, high)
    first_tail = len(mine) + len(cut)
    whole, head, tail = load[: len(mine)], load[len(mine) : first_tail], load[first_tail:]
    freed = whole[task] - np.concatenate([np.zeros_like(whole), tail, head])
    pieces = Pieces(leaves[task], mine[task], document[task], low, high, load, freed)
    if len(ranks) == 1:
        return pieces
    return pieces.take(np.argsort(pieces.leaves, kind="stable"))


def best_moves(
    problem: Problem, pieces: Pieces, slowest: Ints, rows: Ints, load: Ints, latest: float
) -> dict[int, Move]:
    """Returns for each slow rank the move after which the later of its two ranks is earliest.

    Of those that are within the bound, it is the one with the fewest bytes. A rank for which none
    helps has none.

    slowest: the slow ranks.
    latest: the finishing time of the bound.
    """
    devices = problem.devices
    finish = devices.finish_ps(load)
    piece, server = _options(pieces, _servers(devices, finish, slowest))
    leaves = pieces.leaves[piece]
    rank = slowest[leaves]
    later = np.maximum(
        devices.finish_ps(load[rank] - pieces.freed_load[piece], rank),
        devices.finish_ps(load[server] + pieces.added_load[piece], server),
    )
    left = np.flatnonzero(later < finish[rank])
    moves: dict[int, Move] = {}
    for _ in range(NUM_TASKS):
        if not len(left):
            break
        chosen = left[_best_of_each(problem, pieces, piece[left], np.maximum(later[left], latest))]
        no_room = []
        found = pieces.moves(piece[chosen], server[chosen])
        for option, of, move in zip(chosen.tolist(), leaves[chosen].tolist(), found, strict=True):
            if fits(problem, rows, move):
                moves[of] = move
            else:
                no_room.append(option)
        if not no_room:
            break
        left = left[~np.isin(left, no_room) & ~np.isin(leaves[left], list(moves))]
    return moves


def _best_of_each(problem: Problem, pieces: Pieces, piece: Ints, until: Floats) -> Ints:
    """Returns the best option of each slow rank, by its index.

    piece: [options] that move.
    until: [options] when the later of the two ranks finishes, at the bound or later.
    """
    best = np.flatnonzero(_is_least(until, pieces.leaves[piece]))
    of = piece[best]
    moved = moved_bytes(problem, pieces.document[of], pieces.low[of], pieces.high[of])
    best = best[_is_least(moved, pieces.leaves[of])]
    return best[_is_first(pieces.leaves[piece[best]])]


def _is_least(values: Ints | Floats, group: Ints) -> Bools:
    """Returns which values are the least of their group; groups are ascending."""
    first = np.flatnonzero(_is_first(group))
    least = np.minimum.reduceat(values, first)
    return np.asarray(values == np.repeat(least, np.diff(first, append=len(group))))


def _is_first(group: Ints) -> Bools:
    return np.asarray(np.append(True, group[1:] != group[:-1]))


def _options(pieces: Pieces, servers: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
    """Returns (piece, server) of all pieces of each slow rank on each of its servers."""
    leaves = as_ints([n for n, own in enumerate(servers) for _ in own])
    first = pieces.leaves.searchsorted(leaves)
    count = pieces.leaves.searchsorted(leaves, side="right") - first
    server = as_ints([one for own in servers for one in own])
    return expand(first, count), np.repeat(server, count)


def _servers(devices: Devices, finish: Ints, slowest: Ints) -> list[list[int]]:
    """Returns where tasks of each slow rank may go, the ranks that finish first for the slowest.

    These are the rank that finishes first, and those that are faster than all that finish before.
    With more to do, no other rank would finish before all of these. What one slow rank uses, the
    next does not; some may get none.
    """
    serving = devices.serving
    if devices.equally_fast:
        first = serving[np.argsort(finish[serving], kind="stable")[: len(slowest)]]
        return first[:, None].tolist()  # type: ignore[no-any-return]
    order = serving[np.lexsort((-devices.speed[serving], finish[serving]))]
    servers: list[list[int]] = [[] for _ in slowest]
    fastest = [0.0] * len(slowest)  # speeds of the last servers of slow ranks, negative: ascending
    for server, speed in zip(order.tolist(), devices.speed[order].tolist(), strict=True):
        number = bisect_right(fastest, -speed)
        if number < len(servers):
            servers[number].append(server)
            fastest[number] = -speed
    return servers


def _possible_cuts(grain: Grain, start: Ints, stop: Ints, rank: Ints) -> tuple[Ints, Ints]:
    """Returns (task, position) of cuts that leave at least ``min_shard`` on both sides."""
    first, last = grain.first_cut(start), grain.last_cut(stop)
    num_cuts = np.bincount(rank, np.maximum(last - first + 1, 0))
    most = min(NUM_CUTS, ALL_CUTS // max(len(num_cuts), 1))  # of a rank
    every = 1 + num_cuts.astype(np.int64)[rank] // most
    first, last = -(-first // every), last // every
    count = np.maximum(last - first + 1, 0)
    cut = expand(first, count) * np.repeat(every * grain.spacing, count)
    return np.repeat(np.arange(len(start)), count), cut


def moved_bytes(problem: Problem, document: Ints, low: Ints, high: Ints) -> Ints:
    """Returns what queries [low, high) move, if their server has none of their keys."""
    num_keys = problem.masks.num_keys(document, low, high)
    return problem.shape.qo_bytes * (high - low) + problem.shape.kv_bytes * num_keys


def rows_after(rows: Ints, moves: list[Move]) -> Ints:
    """Returns the rows after moves: a piece takes the place of its task, others come last."""
    row, low, high, server, _, _ = as_ints(moves).T
    shard, start, stop, before = rows[:, row]
    moved, has_head = as_ints([shard, low, high, server]), start < low
    tail = as_ints([shard, high, stop, before])[:, high < stop]
    rows = np.concatenate([rows, moved[:, has_head], tail], axis=1)
    # A head stays in the row of its task; otherwise the piece takes its place.
    rows[2:, row] = np.where(has_head, as_ints([low, before]), moved[2:])
    return rows


def fits(problem: Problem, rows: Ints, move: Move) -> bool:
    """Returns whether the server of a move has the memory for it."""
    limit = problem.devices.memory_bytes[move.server]
    if limit == UNLIMITED:
        return True
    tasks = Tasks.build(problem.placement, problem.reach, rows_after(rows, [move]))
    used = memory_bytes(tasks, problem.placement, problem.shape, problem.devices.num_ranks)
    return bool(used[move.server] <= limit)
