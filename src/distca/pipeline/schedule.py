"""Pipeline schedules as data, which can be printed and parsed; errors name the wrong cell.

A schedule is a sequence of *ticks*. In a tick all stages run in the same direction, so that their
attention forms one pool of tasks; a stage without a micro-batch only serves the other stages.

    tick     0   1   2   3   4   5   6   7   in flight
    phase    F   F   B   F   B   F   B   B
    stage 0  F0  F1  .   F2  B0  .   B1  B2  3
    stage 1  .   F0  B0  F1  B1  F2  B2  .   1
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import Literal

Phase = Literal["F", "B"]
FORWARD: Phase = "F"
BACKWARD: Phase = "B"
SERVES = "."

_PHASES: dict[str, Phase] = {"F": FORWARD, "B": BACKWARD}


def micro_batch_name(phase: Phase, micro_batch: int) -> str:
    """Returns the words for a cell, as timelines have them."""
    return f"{'forward' if phase == FORWARD else 'backward'}, micro-batch {micro_batch}"


@dataclass(frozen=True)
class Tick:
    """One tick of a schedule: the direction of all stages, and the micro-batch of each."""

    phase: Phase
    micro_batches: tuple[int | None, ...]  # [stages]; None: the stage only serves

    def __post_init__(self) -> None:
        if self.phase not in _PHASES:
            raise ValueError(f"the phase of a tick is {self.phase!r}: it must be F or B")

    def cell(self, stage: int) -> str:
        """Returns the printed cell of a stage: ``F3``, ``B3``, or ``.`` if it only serves."""
        micro_batch = self.micro_batches[stage]
        return SERVES if micro_batch is None else f"{self.phase}{micro_batch}"

    @property
    def running(self) -> Iterator[tuple[int, int]]:
        """Yields (stage, micro-batch) of the stages that do not only serve."""
        for stage, micro_batch in enumerate(self.micro_batches):
            if micro_batch is not None:
                yield stage, micro_batch


@dataclass(frozen=True)
class Schedule:
    """Runs every micro-batch once forward and once backward on every stage, or only forward.

    Each stage runs its micro-batches in increasing order in both directions.
    """

    ticks: tuple[Tick, ...]

    def __post_init__(self) -> None:
        if not self.ticks or not self.ticks[0].micro_batches:
            raise ValueError("the schedule is empty: it needs 1 or more stages and micro-batches")
        done = {phase: [0] * self.num_stages for phase in (FORWARD, BACKWARD)}
        for number, tick in enumerate(self.ticks):
            if len(tick.micro_batches) != self.num_stages:
                raise ValueError(
                    f"tick {number} has {len(tick.micro_batches)} cells but tick 0 has"
                    f" {self.num_stages}: every tick needs one for each stage, None where it only"
                    " serves"
                )
            for stage, micro_batch in tick.running:
                obstacle = _obstacle(tick.phase, stage, micro_batch, done)
                if obstacle:
                    raise ValueError(f"tick {number}, stage {stage}: {tick.cell(stage)} {obstacle}")
            for stage, _ in tick.running:
                done[tick.phase][stage] += 1
        if not self.num_micro_batches:
            raise ValueError("the schedule has no micro-batch: give one or more")
        for phase in (FORWARD, BACKWARD) if self.has_backward else (FORWARD,):
            for stage, count in enumerate(done[phase]):
                if count < self.num_micro_batches:
                    raise ValueError(
                        f"stage {stage} has no {phase}{count} in any of {len(self.ticks)} ticks:"
                        f" all {self.num_micro_batches} micro-batches must run on every stage,"
                        " forward and backward, or only forward in a schedule for evaluation"
                    )

    @classmethod
    def aligned(cls, stages: int, micro_batches: int) -> Schedule:
        """Returns 1F1B with all stages running in the same direction in every tick.

        Stage s is s forward ticks behind the first stage and ``stages - 1 - s`` backward ticks
        behind the last. It holds up to min(micro_batches, 2 (stages - 1 - s) + 1) micro-batches in
        flight, where 1F1B without alignment holds ``stages - s``. With one stage, this is plain
        gradient accumulation.
        """
        forward = _diagonal(FORWARD, range(stages), micro_batches)
        backward = _diagonal(BACKWARD, range(stages)[::-1], micro_batches)
        turns = zip(forward[stages - 1 :], backward[:micro_batches], strict=True)
        steady = [tick for pair in turns for tick in pair]
        return cls((*forward[: stages - 1], *steady, *backward[micro_batches:]))

    @classmethod
    def forward_only(cls, stages: int, micro_batches: int) -> Schedule:
        """Returns a schedule for evaluation, without backward ticks and with nothing in flight."""
        return cls(tuple(_diagonal(FORWARD, range(stages), micro_batches)))

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Parses what ``str`` returns, or only its cells with one line for each stage.

        The numbers of ticks and of micro-batches in flight are ignored, since they follow from the
        cells. A phase row must agree with the cells.
        """
        phases: list[list[str]] = []  # one row or none
        stages: list[list[str]] = []
        for words in filter(None, map(str.split, text.splitlines())):
            if words[0] == "phase":
                phases = [words[1:]]
            elif words[0] != "tick":
                stages.append(_read_stage(len(stages), words))
        columns = enumerate(zip_longest(*phases, *stages, fillvalue="missing"))
        return cls(tuple(_read_tick(number, words, bool(phases)) for number, words in columns))

    @property
    def num_stages(self) -> int:
        return len(self.ticks[0].micro_batches)

    @cached_property
    def num_micro_batches(self) -> int:
        return sum(t.phase == FORWARD and t.micro_batches[0] is not None for t in self.ticks)

    @cached_property
    def has_backward(self) -> bool:
        """Whether there are backward ticks."""
        return any(tick.phase == BACKWARD for tick in self.ticks)

    @cached_property
    def in_flight(self) -> tuple[int, ...]:
        """[stages] The most micro-batches whose activations a stage holds at the same time.

        Without backward ticks it is 0 on every stage.
        """
        held, most = [0] * self.num_stages, [0] * self.num_stages
        for tick in self.ticks if self.has_backward else ():
            for stage, _ in tick.running:
                held[stage] += 1 if tick.phase == FORWARD else -1
                most[stage] = max(most[stage], held[stage])
        return tuple(most)

    def __str__(self) -> str:
        """Returns a table with a line for each stage and a column for each tick."""
        rows = [
            ["tick", *map(str, range(len(self.ticks))), "in flight"],
            ["phase", *(tick.phase for tick in self.ticks)],
        ]
        for stage, in_flight in enumerate(self.in_flight):
            cells = (tick.cell(stage) for tick in self.ticks)
            rows.append([f"stage {stage}", *cells, str(in_flight)])
        head = max(len(row[0]) for row in rows)
        width = max(len(word) for row in rows for word in row[1 : len(self.ticks) + 1])
        return "\n".join(
            "  ".join([row[0].ljust(head), *(word.ljust(width) for word in row[1:])]).rstrip()
            for row in rows
        )


def _obstacle(phase: Phase, stage: int, micro_batch: int, done: dict[Phase, list[int]]) -> str:
    """Returns why a cell cannot run now; empty if it can.

    done: the number of micro-batches that each stage has run in earlier ticks.
    """
    due = done[phase][stage]
    if micro_batch != due:
        return (
            f"is in the place of {phase}{due}: a stage runs all micro-batches in increasing order,"
            " each once forward and once backward"
        )
    needs = (
        [(FORWARD, stage - 1)] if phase == FORWARD else [(FORWARD, stage), (BACKWARD, stage + 1)]
    )
    for earlier, other in needs:
        if 0 <= other < len(done[earlier]) and done[earlier][other] <= micro_batch:
            return (
                f"needs {earlier}{micro_batch} of stage {other} in an earlier tick: move it later"
            )
    return ""


def _diagonal(phase: Phase, delays: Sequence[int], micro_batches: int) -> list[Tick]:
    """Returns all ticks of one direction, in which stage s starts after delays[s] ticks."""
    return [
        Tick(phase, tuple(k - d if 0 <= k - d < micro_batches else None for d in delays))
        for k in range(micro_batches + len(delays) - 1)
    ]


def _read_stage(stage: int, words: list[str]) -> list[str]:
    """Returns the cells of a line, without the stage's name and its micro-batches in flight."""
    if words[0] == "stage":
        if words[1:2] != [str(stage)]:
            raise ValueError(
                f"the line {' '.join(words[:2])!r} is in the place of stage {stage}: write the"
                " stages in order, starting with 0"
            )
        words = words[2:]
    return words[:-1] if words[-1:] and words[-1].isdecimal() else words


def _read_tick(number: int, words: Sequence[str], has_phase: bool) -> Tick:
    """Parses a column, in which the phase is followed by the cells.

    Without a phase, the direction is that of the first micro-batch.
    """
    if not has_phase:
        words = [next((word[0] for word in words if word != SERVES), "unknown"), *words]
    phase, *cells = words
    if phase not in _PHASES:
        raise ValueError(
            f"the phase of tick {number} is {phase}: write F or B, in the phase row or in a cell"
        )
    for stage, cell in enumerate(cells):
        if cell != SERVES and not (cell[0] == phase and cell[1:].isdecimal()):
            raise ValueError(
                f"tick {number}, stage {stage}: {cell!r} is not a cell of phase {phase}: write"
                f" {phase} and the number of a micro-batch, or {SERVES}, since all stages of a tick"
                " run in one direction"
            )
    micro_batches = (None if cell == SERVES else int(cell[1:]) for cell in cells)
    return Tick(_PHASES[phase], tuple(micro_batches))
