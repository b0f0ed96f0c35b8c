"""A slow and simple simulator that is driven by events.

Every rank has a list of instructions, which its compute stream executes in order:

    run SECONDS    computes
    send NAME      queues a transfer at the port, and continues
    wait NAME      waits until that transfer is done on this rank
    drain          waits until the port is idle

The port runs transfers in the order in which they were queued. A transfer is done on a rank when
the rank and all its partners have spent their own seconds on it; until then it occupies the rank's
port. Ranks without seconds of a transfer do not take part in it.

While its port is occupied, a rank computes with the share of its SMs that transfers leave to it.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

Instruction = tuple[str, Any]
Program = list[Instruction]
DRAIN: Instruction = ("drain", None)


@dataclass(frozen=True)
class OracleTransfer:
    """Seconds of the port, and the partners, itself included, of each rank that takes part."""

    seconds: Mapping[int, float]
    partners: Mapping[int, frozenset[int]]


@dataclass
class Played:
    """The result, by rank."""

    finish: list[float]  # of the compute stream
    port: list[float]  # when it was last freed
    busy: list[float]
    waited: list[float]


def play(
    programs: Sequence[Program],
    transfers: Mapping[Hashable, OracleTransfer],
    transfer_sms: float = 0.0,
) -> Played:
    return _Play(programs, transfers, transfer_sms).played()


@dataclass
class _Rank:
    todo: deque[Instruction]
    queue: deque[Hashable] = field(default_factory=deque)  # handed to the port
    sending: Hashable = None
    computing: int | None = None  # the event at which it is done, unless the port changes before
    left: float = 0.0  # seconds of computing with all SMs, at the time ``since``
    since: float = 0.0
    waits_since: float | None = None
    done: set[Hashable] = field(default_factory=set)
    finish: float = 0.0
    port: float = 0.0
    busy: float = 0.0
    waited: float = 0.0


class _Play:
    def __init__(
        self,
        programs: Sequence[Program],
        transfers: Mapping[Hashable, OracleTransfer],
        transfer_sms: float,
    ) -> None:
        self.ranks = [_Rank(deque(program)) for program in programs]
        self.transfers, self.transfer_sms = transfers, transfer_sms
        self.through: dict[Hashable, set[int]] = {name: set() for name in transfers}
        self.heap: list[tuple[float, int, str, int]] = []
        self.ticket = count()

    def played(self) -> Played:
        for number in range(len(self.ranks)):
            self.go_on(number, 0.0)
        while self.heap:
            now, ticket, what, number = heapq.heappop(self.heap)
            if what == "computed":
                if ticket == self.ranks[number].computing:
                    self.has_computed(number, now)
            else:
                self.is_through(number, now)
        assert not any(rank.todo for rank in self.ranks), "deadlock"
        columns = ([getattr(rank, name) for rank in self.ranks] for name in Played.__annotations__)
        return Played(*columns)

    def at(self, time: float, what: str, number: int) -> int:
        ticket = next(self.ticket)
        heapq.heappush(self.heap, (time, ticket, what, number))
        return ticket

    def speed(self, number: int) -> float:
        return 1.0 if self.ranks[number].sending is None else 1 - self.transfer_sms

    def compute(self, number: int, seconds: float, now: float) -> None:
        """Computes what takes some seconds with all SMs, at the speed that there is now."""
        rank = self.ranks[number]
        rank.left, rank.since = seconds, now
        rank.computing = self.at(now + seconds / self.speed(number), "computed", number)

    def occupy(self, number: int, name: Hashable, now: float) -> None:
        """Gives the port to a transfer, or to none, which changes the speed of computing."""
        rank = self.ranks[number]
        done = (now - rank.since) * self.speed(number)
        rank.sending = name
        if rank.computing is not None:
            rank.busy += now - rank.since
            self.compute(number, max(rank.left - done, 0.0), now)

    def has_computed(self, number: int, now: float) -> None:
        rank = self.ranks[number]
        rank.busy += now - rank.since
        rank.computing, rank.finish = None, now
        self.go_on(number, now)

    def go_on(self, number: int, now: float) -> None:
        """Executes instructions on the compute stream until one of them takes time."""
        rank = self.ranks[number]
        if rank.computing is not None:
            return
        while rank.todo:
            verb, what = rank.todo[0]
            if verb in ("wait", "drain") and not self.arrived(number, verb, what):
                rank.waits_since = now if rank.waits_since is None else rank.waits_since
                return
            if rank.waits_since is not None:
                rank.waited += now - rank.waits_since
                rank.waits_since, rank.finish = None, now
            rank.todo.popleft()
            if verb == "run":
                self.compute(number, what, now)
                return
            if verb == "send" and number in self.transfers[what].seconds:
                rank.queue.append(what)
                self.begin(number, now)

    def arrived(self, number: int, verb: str, what: Hashable) -> bool:
        rank = self.ranks[number]
        if verb == "drain":
            return not rank.queue and rank.sending is None
        return what in rank.done or number not in self.transfers[what].seconds

    def begin(self, number: int, now: float) -> None:
        """Starts the next transfer if the port is free."""
        rank = self.ranks[number]
        if rank.sending is None and rank.queue:
            self.occupy(number, rank.queue.popleft(), now)
            self.at(now + self.transfers[rank.sending].seconds[number], "through", number)

    def is_through(self, number: int, now: float) -> None:
        name = self.ranks[number].sending
        self.through[name].add(number)
        ended = [
            other
            for other, partners in self.transfers[name].partners.items()
            if number in partners and partners <= self.through[name]
        ]
        for other in ended:
            rank = self.ranks[other]
            rank.done.add(name)
            rank.port = now
            self.occupy(other, None, now)
            self.begin(other, now)
        for other in ended:
            self.go_on(other, now)


# -- one pass through layers ---------------------------------------------------------------------


@dataclass(frozen=True)
class Attended:
    """One layer's attention of one half: seconds by rank, and what travels before and after."""

    own: Sequence[float]
    remote: Sequence[float]
    out: OracleTransfer | None = None
    back: OracleTransfer | None = None


@dataclass(frozen=True)
class Pass:
    """A seam is what lies between two attentions; there is one more of them than of attentions."""

    parts: Sequence[Sequence[Sequence[float]]]  # [seams][halves][ranks]
    attention: Sequence[Sequence[Attended]]  # [seams - 1][halves]
    gathering: Sequence[OracleTransfer | None] = ()  # [seams], or none at all
    reducing: Sequence[OracleTransfer | None] = ()


Named = dict[Hashable, OracleTransfer]


def programs_of(one: Pass, ranks: int, tag: Hashable = 0) -> tuple[list[Program], Named]:
    """Returns the instructions of every rank; names of transfers begin with ``tag``."""
    named: Named = {}
    for seam, halves in enumerate(one.attention):
        for half, attended in enumerate(halves):
            name(named, (tag, "dispatch", seam, half), attended.out)
            name(named, (tag, "combine", seam, half), attended.back)
    for what, transfers in (("weights", one.gathering), ("gradients", one.reducing)):
        for seam, transfer in enumerate(transfers):
            name(named, (tag, what, seam), transfer)
    programs = [
        [
            (verb, what)
            for verb, what in _instructions(one, rank, tag)
            if verb == "run" or what in named
        ]
        for rank in range(ranks)
    ]
    return programs, named


def name(named: Named, name: Hashable, transfer: OracleTransfer | None) -> None:
    if transfer is not None:
        named[name] = transfer


def _instructions(one: Pass, rank: int, tag: Hashable) -> Iterator[Instruction]:
    last = len(one.parts) - 1
    yield "send", (tag, "weights", 0)
    for seam, halves in enumerate(one.parts):
        # The weights of the next seam are gathered while this one computes.
        yield "send", (tag, "weights", seam + 1)
        yield "wait", (tag, "weights", seam)
        for half, seconds in enumerate(halves):
            yield "wait", (tag, "combine", seam - 1, half)
            yield "run", seconds[rank]
            yield "send", (tag, "dispatch", seam, half)
        yield "send", (tag, "gradients", seam)
        if seam == last:
            return
        for half, attended in enumerate(one.attention[seam]):
            yield "run", attended.own[rank]
            yield "wait", (tag, "dispatch", seam, half)
            yield "run", attended.remote[rank]
            yield "send", (tag, "combine", seam, half)


# -- the usual pipeline --------------------------------------------------------------------------

Cell = tuple[str, int, int]  # F or B, stage, micro-batch


def usual_pipeline(
    forward: Sequence[Sequence[float]],
    backward: Sequence[Sequence[float]],
    passing: Sequence[Sequence[float]],
) -> dict[Cell, tuple[float, float]]:
    """Returns start and stop of each cell of one group.

    Times are [stages][micro_batches]; ``passing`` are seconds of sending from stage s to s + 1.

    A stage goes forward unless it holds as many micro-batches as stages are left, itself included,
    or none is left to begin; then it goes backward.
    """
    stages, micro_batches = len(forward), len(forward[0])
    taken = {"F": forward, "B": backward}
    begun = {"F": [0] * stages, "B": [0] * stages}
    working = [False] * stages
    arrived: set[Cell] = {("F", 0, m) for m in range(micro_batches)}
    found: dict[Cell, tuple[float, float]] = {}
    heap: list[tuple[float, int, str, Cell]] = []
    ticket = count()

    def next_cell(stage: int) -> Cell | None:
        held = begun["F"][stage] - begun["B"][stage]
        if begun["F"][stage] < micro_batches and held < stages - stage:
            return "F", stage, begun["F"][stage]
        return ("B", stage, begun["B"][stage]) if begun["B"][stage] < micro_batches else None

    def begin(stage: int, now: float) -> None:
        cell = next_cell(stage)
        if working[stage] or cell not in arrived:
            return
        phase, _, m = cell
        working[stage] = True
        begun[phase][stage] += 1
        found[cell] = (now, now + taken[phase][stage][m])
        heapq.heappush(heap, (found[cell][1], next(ticket), "ended", cell))

    begin(0, 0.0)
    while heap:
        now, _, what, (phase, stage, m) = heapq.heappop(heap)
        if what == "arrived":
            arrived.add((phase, stage, m))
            begin(stage, now)
            continue
        working[stage] = False
        neighbor = stage + 1 if phase == "F" else stage - 1
        if neighbor == stages:  # the last stage turns round
            arrived.add(("B", stage, m))
        elif neighbor >= 0:
            cell, on_the_way = (phase, neighbor, m), passing[min(stage, neighbor)][m]
            heapq.heappush(heap, (now + on_the_way, next(ticket), "arrived", cell))
        begin(stage, now)
    assert len(found) == 2 * stages * micro_batches, "deadlock"
    return found
