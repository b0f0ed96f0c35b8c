"""The program of a tick: what it contains, in which order, and how it prints."""

from __future__ import annotations

from itertools import product

import pytest

from distca.pipeline.schedule import BACKWARD, FORWARD, Phase
from distca.pipeline.tick_program import Operation, TickProgram

SIZES = list(product((0, 1, 2, 5), (1, 2)))
PHASES: tuple[Phase, ...] = (FORWARD, BACKWARD)

FORWARD_2_2 = """\
seam 0  linear(ping) dispatch(ping) linear(pong) dispatch(pong)
slot 0  compute(ping) compute(pong)
seam 1  combine(ping) linear(ping) dispatch(ping) combine(pong) linear(pong) dispatch(pong)
slot 1  compute(ping) compute(pong)
seam 2  combine(ping) linear(ping) combine(pong) linear(pong)"""


def test_a_forward_tick_prints_as_documented() -> None:
    assert str(TickProgram.of(2, 2, FORWARD)) == FORWARD_2_2


def test_in_a_backward_tick_the_last_half_comes_first() -> None:
    swapped = FORWARD_2_2.replace("ping", "?").replace("pong", "ping").replace("?", "pong")
    assert str(TickProgram.of(2, 2, BACKWARD)) == swapped


@pytest.mark.parametrize(("slots", "halves"), SIZES)
def test_a_backward_tick_is_the_forward_tick_from_its_end(slots: int, halves: int) -> None:
    swapped = {"dispatch": "combine", "combine": "dispatch"}
    forward, backward = (TickProgram.of(slots, halves, phase).operations for phase in PHASES)
    for there, back in zip(forward, reversed(backward), strict=True):
        assert back.kind == swapped.get(there.kind, there.kind)
        assert back.half == there.half
        for number, last in ((there.slot, slots - 1), (there.seam, slots)):
            other = back.slot if last == slots - 1 else back.seam
            assert (number is None) == (other is None)
            assert number is None or number + other == last


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("slots", "halves"), SIZES)
def test_every_half_goes_through_every_seam_and_slot_once(
    slots: int, halves: int, phase: Phase
) -> None:
    program = TickProgram.of(slots, halves, phase)
    for half in range(halves):
        mine = [op for op in program.operations if op.half == half]
        expected = [Operation("linear", half, None, 0)]
        for slot in range(slots):
            expected += [
                Operation("dispatch", half, slot, slot),
                Operation("compute", half, slot, None),
                Operation("combine", half, slot, slot + 1),
                Operation("linear", half, None, slot + 1),
            ]
        assert mine == expected
    assert len(program.operations) == halves * (1 + 4 * slots)
    assert [section[0].seam for section in program.sections][::2] == list(range(slots + 1))
    assert sum(program.sections, ()) == program.operations
