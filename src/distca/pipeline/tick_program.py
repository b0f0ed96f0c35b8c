"""The operations of one tick, as data: the runtime executes them and the simulator times them.

A forward tick with two attention slots and two halves:

    seam 0  linear(ping) dispatch(ping) linear(pong) dispatch(pong)
    slot 0  compute(ping) compute(pong)
    seam 1  combine(ping) linear(ping) dispatch(ping) combine(pong) linear(pong) dispatch(pong)
    slot 1  compute(ping) compute(pong)
    seam 2  combine(ping) linear(ping) combine(pong) linear(pong)

Every exchange but the first and the last overlaps with computation of the other half: what
dispatch(ping) sends travels during linear(pong), what dispatch(pong) sends during compute(ping),
and the results return during compute(pong) and the next linear(ping).

The operations of one seam run inside one call of its module, for all halves, so that FSDP gathers
its parameters once.

[Note: order of backward] Autograd executes the newest node first. A backward tick is therefore the
forward tick read from its end, where the backward of a combine is a dispatch and the other way
round. Seams and slots are numbered in the order of execution in both directions, so a backward
program looks like a forward program in which the last half comes first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Literal

from distca.pipeline.schedule import FORWARD, Phase

Kind = Literal["linear", "dispatch", "compute", "combine"]
HALF_NAMES = ("ping", "pong")
_SWAPPED: dict[Kind, Kind] = {"dispatch": "combine", "combine": "dispatch"}  # in backward


@dataclass(frozen=True)
class Operation:
    """One operation on one half of a micro-batch."""

    kind: Kind
    half: int
    slot: int | None  # the attention slot; None for linear layers
    seam: int | None  # the seam whose call contains it; None for compute, which is between seams

    def __str__(self) -> str:
        return f"{self.kind}({HALF_NAMES[self.half]})"


@dataclass(frozen=True)
class TickProgram:
    """The operations of a tick in the order of execution."""

    operations: tuple[Operation, ...]

    @classmethod
    def of(cls, slots: int, halves: int, phase: Phase) -> TickProgram:
        """Makes the program of a tick with ``slots`` attention slots."""
        forward = tuple(_forward(slots, halves))
        if phase == FORWARD:
            return cls(forward)
        return cls(tuple(_backward(operation, slots) for operation in reversed(forward)))

    @cached_property
    def sections(self) -> tuple[tuple[Operation, ...], ...]:
        """The operations of each seam call, and of each slot between two seam calls."""
        return tuple(tuple(group) for _, group in groupby(self.operations, lambda op: op.seam))

    def __str__(self) -> str:
        return "\n".join(
            f"{_title(section[0])}  {' '.join(map(str, section))}" for section in self.sections
        )


def _forward(slots: int, halves: int) -> Iterator[Operation]:
    for seam in range(slots + 1):
        for half in range(halves):
            if seam > 0:
                yield Operation("combine", half, slot=seam - 1, seam=seam)
            yield Operation("linear", half, slot=None, seam=seam)
            if seam < slots:
                yield Operation("dispatch", half, slot=seam, seam=seam)
        for half in range(halves if seam < slots else 0):
            yield Operation("compute", half, slot=seam, seam=None)


def _backward(operation: Operation, slots: int) -> Operation:
    """Returns the backward of an operation, numbered from the end of the forward program."""
    return Operation(
        kind=_SWAPPED.get(operation.kind, operation.kind),
        half=operation.half,
        slot=None if operation.slot is None else slots - 1 - operation.slot,
        seam=None if operation.seam is None else slots - operation.seam,
    )


def _title(first: Operation) -> str:
    return f"slot {first.slot}" if first.seam is None else f"seam {first.seam}"
