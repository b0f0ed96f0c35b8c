"""Schedules: what they promise, how they read and print, and the cell that an error points at."""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distca.pipeline.schedule import BACKWARD, FORWARD, Phase, Schedule, Tick

sizes = st.integers(1, 6)

ALIGNED_2_3 = """\
tick     0   1   2   3   4   5   6   7   in flight
phase    F   F   B   F   B   F   B   B
stage 0  F0  F1  .   F2  B0  .   B1  B2  3
stage 1  .   F0  B0  F1  B1  F2  B2  ."""


def is_valid(ticks: Sequence[Tick]) -> bool:
    """The rules, word for word, over the ticks in which each micro-batch is on each stage."""
    ran: dict[tuple[Phase, int, int], list[int]] = defaultdict(list)
    for number, tick in enumerate(ticks):
        for stage, m in enumerate(tick.micro_batches):
            if m is not None:
                ran[tick.phase, m, stage].append(number)
    trains = any(tick.phase == BACKWARD for tick in ticks)
    last = len(ticks[0].micro_batches) - 1
    most = max((m for _, m, _ in ran), default=-1)
    cells = [(m, s) for m in range(most + 1) for s in range(last + 1)]
    once = [ran[FORWARD, m, s] for m, s in cells]
    if trains:
        once += [ran[BACKWARD, m, s] for m, s in cells]
    if not cells or any(len(numbers) != 1 for numbers in once):
        return False

    def before(first: tuple[Phase, int, int], second: tuple[Phase, int, int]) -> bool:
        return ran[first][0] < ran[second][0]

    return all(
        (s == 0 or before((FORWARD, m, s - 1), (FORWARD, m, s)))
        and (m == 0 or before((FORWARD, m - 1, s), (FORWARD, m, s)))
        and (not trains or before((FORWARD, m, s), (BACKWARD, m, s)))
        and (not trains or s == last or before((BACKWARD, m, s + 1), (BACKWARD, m, s)))
        and (not trains or m == 0 or before((BACKWARD, m - 1, s), (BACKWARD, m, s)))
        for m, s in cells
    )


@st.composite
def some_ticks(draw: st.DrawFn) -> tuple[Tick, ...]:
    """Ticks of any valid schedule: each takes some of what could run, now and then nothing."""
    stages, count = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    trains = draw(st.booleans())
    chance = random.Random(draw(st.integers(0, 1 << 30)))
    forward, backward = [0] * stages, [0] * stages
    ticks: list[Tick] = []
    while sum(forward) + trains * sum(backward) < stages * count * (1 + trains):
        if trains and chance.random() < 0.5:
            done, limits, phase = backward, [*backward[1:], count], BACKWARD
            limits = [min(pair) for pair in zip(limits, forward, strict=True)]
        else:
            done, limits, phase = forward, [count, *forward[:-1]], FORWARD
        runs = [done[s] < limits[s] and chance.random() < 0.8 for s in range(stages)]
        ticks.append(Tick(phase, tuple(done[s] if runs[s] else None for s in range(stages))))
        done[:] = [d + run for d, run in zip(done, runs, strict=True)]
    return tuple(ticks)


@given(sizes, sizes)
def test_aligned(stages: int, micro_batches: int) -> None:
    schedule = Schedule.aligned(stages, micro_batches)
    pairs = micro_batches * "FB"
    phases = "".join(tick.phase for tick in schedule.ticks)
    assert phases == (stages - 1) * "F" + pairs + (stages - 1) * "B"
    assert (schedule.num_stages, schedule.num_micro_batches) == (stages, micro_batches)
    assert schedule.has_backward
    held = (min(micro_batches, 2 * (stages - 1 - s) + 1) for s in range(stages))
    assert schedule.in_flight == tuple(held)
    idle = [tick.micro_batches.count(None) for tick in schedule.ticks]
    bubble = sum(idle) / (len(idle) * stages)
    assert bubble == pytest.approx((stages - 1) / (micro_batches + stages - 1))


@given(sizes, sizes)
def test_forward_only(stages: int, micro_batches: int) -> None:
    schedule = Schedule.forward_only(stages, micro_batches)
    assert len(schedule.ticks) == micro_batches + stages - 1
    assert (schedule.num_stages, schedule.num_micro_batches) == (stages, micro_batches)
    assert not schedule.has_backward
    assert schedule.in_flight == (0,) * stages


def test_one_stage_accumulates_gradients() -> None:
    cells = [tick.cell(0) for tick in Schedule.aligned(1, 3).ticks]
    assert cells == ["F0", "B0", "F1", "B1", "F2", "B2"]


@given(some_ticks(), st.data())
def test_one_changed_cell_is_refused_exactly_when_it_breaks_a_rule(
    ticks: tuple[Tick, ...], data: st.DataObject
) -> None:
    assert is_valid(ticks)
    Schedule(ticks)
    number = data.draw(st.integers(0, len(ticks) - 1))
    cells = list(ticks[number].micro_batches)
    stage = data.draw(st.integers(0, len(cells) - 1))
    cells[stage] = data.draw(st.none() | st.integers(0, 4))
    phase = data.draw(st.sampled_from([FORWARD, BACKWARD]))
    changed = (*ticks[:number], Tick(phase, tuple(cells)), *ticks[number + 1 :])
    if is_valid(changed):
        Schedule(changed)
    else:
        with pytest.raises(ValueError, match=r"stage \d|no micro-batch"):
            Schedule(changed)


@given(some_ticks())
def test_a_printed_schedule_reads_back(ticks: tuple[Tick, ...]) -> None:
    schedule = Schedule(ticks)
    assert Schedule.parse(str(schedule)) == schedule
    lines = str(schedule).splitlines()
    assert len({len(line.split()) for line in lines[2:]}) == 1
    if all(set(tick.micro_batches) != {None} for tick in ticks):
        cells = "\n".join(line.split(maxsplit=2)[2] for line in lines[2:])
        assert Schedule.parse(cells) == schedule


def test_the_grid_is_what_a_person_reads() -> None:
    schedule = Schedule.aligned(2, 3)
    assert str(schedule) == ALIGNED_2_3 + "   1"
    assert Schedule.parse(ALIGNED_2_3) == schedule
    assert Schedule.parse("\n  F0 F1  . F2   B0 . B1 B2\n\n.  F0 B0 F1 B1 F2 B2 . 1") == schedule


def test_columns_fit_the_widest_number() -> None:
    lines = str(Schedule.aligned(2, 11)).splitlines()
    assert lines[0].startswith("tick     0    1    2 ")
    assert lines[2].index("F10") == lines[0].index(" 19 ") + 1
    assert lines[2].index("B10") == lines[0].index(" 23 ") + 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "F1 F0 B0 B1",
            "tick 0, stage 0: F1 is in the place of F0: a stage runs all micro-batches",
        ),
        ("F0 F2 B0 B2", "tick 1, stage 0: F2 is in the place of F1"),
        ("F0 B0 F0", "tick 2, stage 0: F0 is in the place of F1"),
        ("F0 F1 B1 B0", "tick 2, stage 0: B1 is in the place of B0"),
        ("B0 F0", "tick 0, stage 0: B0 needs F0 of stage 0 in an earlier tick: move it later"),
        ("F0 .\nF0 .\n. B0", "tick 0, stage 1: F0 needs F0 of stage 0 in an earlier tick"),
        ("F0 . B0\n. F0 B0", "tick 2, stage 0: B0 needs B0 of stage 1 in an earlier tick"),
        ("F0 F1\n. F0", "stage 1 has no F1 in any of 2 ticks: all 2 micro-batches must run"),
        ("F0 F1 B0", "stage 0 has no B1 in any of 3 ticks"),
        ("phase F B\n F0 .", "stage 0 has no B0 in any of 2 ticks"),
        ("phase F\n .", "the schedule has no micro-batch"),
        ("", "the schedule is empty"),
        (
            "F0 F1 .\n. F0 B0\n. . F0",
            "tick 2, stage 2: 'F0' is not a cell of phase B",
        ),
        ("phase F B\nF0 F1", "tick 1, stage 0: 'F1' is not a cell of phase B"),
        ("phase F X\nF0 F1", "the phase of tick 1 is X: write F or B, in the phase row"),
        ("phase F\nF0 F1", "the phase of tick 1 is missing: write F or B"),
        ("F0 . B0", "the phase of tick 1 is unknown: write F or B, in the phase row or in a cell"),
        ("F0 f1", "the phase of tick 1 is f: write F or B"),
        ("F0 Fx", "tick 1, stage 0: 'Fx' is not a cell of phase F: write F and"),
        ("F0\n1F", "tick 0, stage 1: '1F' is not a cell of phase F"),
        (
            "F0 F1\n.",
            "tick 1, stage 1: 'missing' is not a cell of phase F: write F",
        ),
        ("stage 1 . F0\nstage 0 F0 .", "the line 'stage 1' is in the place of stage 0"),
    ],
)
def test_an_error_points_at_its_cell(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Schedule.parse(text)


def test_ticks_must_fit_together() -> None:
    with pytest.raises(ValueError, match="tick 1 has 1 cells but tick 0 has 2: every tick needs"):
        Schedule((Tick(FORWARD, (0, None)), Tick(FORWARD, (0,))))
    with pytest.raises(ValueError, match="the phase of a tick is 'X': it must be F or B"):
        Tick("X", (0,))  # type: ignore[arg-type]


@pytest.mark.parametrize("sizes", [(0, 1), (1, 0)])
def test_a_schedule_needs_stages_and_micro_batches(sizes: tuple[int, int]) -> None:
    for build in (Schedule.aligned, Schedule.forward_only):
        with pytest.raises(ValueError, match="needs 1 or more stages and micro-batches"):
            build(*sizes)
