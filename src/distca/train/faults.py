"""Faults that a run injects into itself, as text.

    kill server 1 step 5 layer 3 backward      the rank kills itself
    stop rank 2 for 3s step 7 tick 1           it freezes, for good without "for 3s"
    slow rank 2 x0.6 steps 5-12                its attention has 0.6 of its speed
    drop connection worker 0 step 4 evaluation
    refuse disk rank 1 step 9                  the checkpoint after step 9 finds no space
    kill new server 0 step 20                  the first server that joins under a new rank

The words after the first may come in any order. Steps are numbered as in ``metrics.jsonl``, from 0.
``train.fault_places`` compares faults with a run, and ``train.injector`` delivers them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from distca.pipeline.mesh import MeshShape

KILL, STOP, SLOW, DROP, REFUSE = ACTIONS = (
    "kill",
    "stop",
    "slow",
    "drop connection",
    "refuse disk",
)
FORWARD, BACKWARD = DIRECTIONS = ("forward", "backward")
BETWEEN, CHECKPOINT, EVALUATION = ("between steps", "checkpoint", "evaluation")
_NUMBER = r"(\d+(?:\.\d+)?)"
_CLAUSES = {
    "action": "|".join(ACTIONS),
    "rank": r"(rank|worker|server|new server) (\d+)",
    "duration": rf"for {_NUMBER} ?s",
    "speed": rf"x{_NUMBER}",
    "step": r"step (\d+)|steps (\d+)-(\d+)",
    "tick": r"tick (\d+)",
    "layer": r"layer (\d+)",
    "place": "|".join((*DIRECTIONS, BETWEEN, CHECKPOINT, EVALUATION)),
}
_EXAMPLE = "write it like 'kill rank 1 step 5' or 'slow rank 2 x0.6 steps 5-12'"


class Steps(NamedTuple):
    first: int
    last: int

    def __str__(self) -> str:
        return (
            f"step {self.first}" if self.first == self.last else f"steps {self.first}-{self.last}"
        )


@dataclass(frozen=True)
class Fault:
    """One fault of one rank; ``str`` returns the text from which it is parsed.

    role, number: "rank", "worker", "server" or "new server", and which one.
    seconds: how long a rank is stopped; None: for good.
    speed: of a slow rank, relative to what it has otherwise.
    tick, layer: of the attention before which it comes; None: any.
    place: a direction of the attention, "between steps" (after the step), "checkpoint" (while that
        of the step is written) or "evaluation"; empty: any attention of the step.
    """

    action: str
    role: str
    number: int
    steps: Steps
    seconds: float | None = None
    speed: float | None = None
    tick: int | None = None
    layer: int | None = None
    place: str = ""

    def __str__(self) -> str:
        words = [self.action, f"{self.role} {self.number}"]
        words += [] if self.seconds is None else [f"for {self.seconds:g}s"]
        words += [] if self.speed is None else [f"x{self.speed:g}"]
        words += [str(self.steps)]
        words += [] if self.tick is None else [f"tick {self.tick}"]
        words += [] if self.layer is None else [f"layer {self.layer}"]
        words += [self.place] if self.place and self.action != REFUSE else []
        return " ".join(words)

    @property
    def before_attention(self) -> bool:
        """Whether it is delivered when its rank dispatches the attention of a layer."""
        return self.action != SLOW and self.place in ("", *DIRECTIONS)

    def rank(self, parallel: MeshShape) -> int:
        """Returns its rank: workers come first, then dedicated servers, then new ones.

        parallel: the mesh at the start. A server that comes back keeps its rank.
        """
        first = {"server": parallel.num_workers, "new server": parallel.num_ranks}
        return self.number + first.get(self.role, 0)

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Raises ValueError with one sentence for text that cannot be meant."""
        found = _clauses(text)
        for clause, what in (("action", "fault"), ("rank", "rank"), ("step", "step")):
            if clause not in found:
                raise ValueError(f"--inject {text!r} names no {what}: {_EXAMPLE}")
        action, steps = (
            str(found["action"][0]),
            [int(n) for n in found["step"][1:] if n is not None],
        )
        role, number = found["rank"][1:3]
        duration, speed, tick, layer = (
            found[clause][1] if clause in found else None
            for clause in ("duration", "speed", "tick", "layer")
        )
        place = found["place"][0] if "place" in found else CHECKPOINT if action == REFUSE else ""
        fault = cls(
            action,
            str(role),
            int(str(number)),
            Steps(steps[0], steps[-1]),
            seconds=None if duration is None else float(duration),
            speed=None if speed is None else float(speed),
            tick=None if tick is None else int(tick),
            layer=None if layer is None else int(layer),
            place=str(place),
        )
        if mistake := _mistake(fault):
            raise ValueError(f"--inject {text!r}: {mistake}")
        return fault


def parse_all(texts: Sequence[str]) -> tuple[Fault, ...]:
    """Parses several faults. Raises ValueError if one is given twice: each is delivered once."""
    faults = tuple(map(Fault.parse, texts))
    for number, fault in enumerate(faults):
        if fault in faults[:number]:
            raise ValueError(
                f"--inject {str(fault)!r} is given twice, and a fault is delivered once: leave one"
                " out, or choose another step"
            )
    return faults


def _clauses(text: str) -> dict[str, tuple[str | None, ...]]:
    """Returns each clause of a fault: its words, and the groups of its pattern."""
    found: dict[str, tuple[str | None, ...]] = {}
    rest = " ".join(text.split())
    while rest:
        matches = ((name, re.match(rf"(?:{p})(?= |$)", rest)) for name, p in _CLAUSES.items())
        clause, match = next(((name, one) for name, one in matches if one), ("", None))
        if match is None:
            raise ValueError(f"--inject {text!r} is not understood at {rest!r}: {_EXAMPLE}")
        if clause in found:
            raise ValueError(
                f"--inject {text!r} has both {found[clause][0]!r} and {match[0]!r}: give one, and"
                " --inject again for another fault"
            )
        if (clause == "action") == bool(found):
            raise ValueError(
                f"--inject {text!r} does not start with what happens: start with one of"
                f" {', '.join(ACTIONS)}"
            )
        found[clause] = (match[0], *match.groups())
        rest = rest[match.end() :].lstrip()
    return found


def _mistake(fault: Fault) -> str:
    """Returns what cannot be meant, whatever the run is; empty if there is nothing."""
    action, steps, place = fault.action, fault.steps, fault.place
    if steps.first > steps.last:
        return f"{steps} end before they start: give the first step first"
    if action != SLOW and steps.first != steps.last:
        return f"{action} comes at one step: give 'step {steps.first}', or several faults"
    if action != STOP and fault.seconds is not None:
        return f"only stop lasts for some seconds: leave out 'for {fault.seconds:g}s'"
    if fault.seconds == 0:
        return "a stop for 0 s is none: give more seconds, or leave out 'for' to stop for good"
    if action != SLOW and fault.speed is not None:
        return f"only slow has a speed: leave out 'x{fault.speed:g}'"
    if action == SLOW and not 0 < (fault.speed or 0) < 1:
        return "slow needs a speed between 0 and 1, relative to that of the rank: give x0.6, say"
    layered = fault.tick is not None or fault.layer is not None
    if action == SLOW and (layered or place):
        return "a rank is slow in all attention of its steps: leave out tick, layer and place"
    if action == REFUSE and (layered or place != CHECKPOINT):
        return "only checkpoints are written to the disk: leave out tick, layer and place"
    if layered and not fault.before_attention:
        return f"ticks and layers have nothing to do with {place!r}: leave out one of them"
    return ""
