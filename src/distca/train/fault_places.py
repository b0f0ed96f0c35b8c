"""Where in a run a fault can come, and the sentence for one that cannot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, takewhile

from distca.pipeline import schedule
from distca.pipeline.schedule import Schedule, Tick
from distca.pipeline.step_planner import StepPlanner
from distca.train.config import TrainSection
from distca.train.faults import BACKWARD, BETWEEN, CHECKPOINT, EVALUATION, FORWARD, Fault

_Layers = frozenset[int]


@dataclass(frozen=True)
class TickSlots:
    """One tick of every step: its direction, and the layers that stages bring to each slot."""

    direction: str
    slots: tuple[_Layers, ...]

    @classmethod
    def of(cls, planner: StepPlanner) -> tuple[TickSlots, ...]:
        """Returns the ticks of a step, which are the same in all steps and on all ranks."""
        ticks = Schedule.aligned(planner.parallel.pp, planner.micro_batches).ticks
        return tuple(
            cls(
                BACKWARD if tick.phase == schedule.BACKWARD else FORWARD,
                tuple(takewhile(bool, (_layers(planner, tick, slot) for slot in count()))),
            )
            for tick in ticks
        )

    def has(self, fault: Fault) -> bool:
        """Returns whether a fault that comes before some attention may come in this tick."""
        return bool(self.slots) and any(
            self.matches(fault, slot) for slot in range(len(self.slots))
        )

    def matches(self, fault: Fault, slot: int) -> bool:
        """Returns whether the direction and the layer of a slot are those of a fault."""
        layer = fault.layer
        return fault.place in ("", self.direction) and (layer is None or layer in self.slots[slot])


def check_faults(faults: Sequence[Fault], planner: StepPlanner, train: TrainSection) -> None:
    """Raises ValueError with one sentence for the first fault that can never come in a run."""
    ticks = TickSlots.of(planner)
    for fault in faults:
        mistake = _no_rank(fault, planner) or _no_step(fault, train) or _no_attention(fault, ticks)
        if mistake:
            raise ValueError(f"--inject {str(fault)!r}: {mistake}")


def _layers(planner: StepPlanner, tick: Tick, slot: int) -> _Layers:
    """Returns the layers that all stages bring to an attention slot."""
    found = (planner.layer(stage, slot, tick.phase) for stage, _ in tick.running)
    return frozenset(layer for layer in found if layer is not None)


def _no_rank(fault: Fault, planner: StepPlanner) -> str:
    p, number = planner.parallel, fault.number
    if fault.role.endswith("server") and not p.servers:
        return "this run has no dedicated servers: name a rank, or set parallel.servers"
    nums = {"rank": p.num_ranks, "worker": p.num_workers, "server": p.servers}
    num = nums.get(fault.role, number + 1)  # how many new servers will join is not known yet
    if number >= num:
        later = "; 'new server 0' is the first that joins" if fault.role == "server" else ""
        return (
            f"there is no {fault.role} {number}: this run has {fault.role}s 0 to {num - 1}{later}"
        )
    if fault.role == "new server" and not fault.steps.last:
        return "step 0 has no new servers: give a later step"
    if fault.place == CHECKPOINT and fault.rank(p) >= p.num_workers:
        return f"{fault.role} {number} is a dedicated server and writes nothing: name a worker"
    return ""


def _no_step(fault: Fault, train: TrainSection) -> str:
    step, steps = fault.steps.last, train.steps
    if step >= steps:
        return f"there is no step {step}: steps are numbered from 0 to {steps - 1}"
    if fault.place == BETWEEN and step + 1 == steps:
        return f"step {step} is the last one: give an earlier step"
    if fault.place == CHECKPOINT and not train.saves_after(step):
        return (
            f"no checkpoint is written after step {step}: give another step, or change"
            f" train.checkpoint_every = {train.checkpoint_every}"
        )
    if fault.place == EVALUATION and not train.evaluates_after(step):
        return (
            f"there is no evaluation after step {step}: give another step, or change"
            f" train.eval_every = {train.eval_every}"
        )
    return ""


def _no_attention(fault: Fault, ticks: Sequence[TickSlots]) -> str:
    """Returns why a step has no attention before which the fault can come."""
    if not fault.before_attention:
        return ""
    tick, layer = fault.tick, fault.layer
    layers = frozenset[int]().union(*(layers for tick in ticks for layers in tick.slots))
    if layer is not None and layer not in layers:
        return f"there is no layer {layer}: the model has layers 0 to {max(layers)}"
    if tick is not None and tick >= len(ticks):
        return f"there is no tick {tick}: the schedule has ticks 0 to {len(ticks) - 1}"
    possible = [number for number, one in enumerate(ticks) if one.has(fault)]
    if tick is None and possible:
        return ""
    what = "attention" if layer is None else f"attention of layer {layer}"
    way = f"{what} {fault.place}".strip()
    if not possible:
        return f"no tick has {way}: what is frozen has no backward pass; choose a later layer"
    if tick not in possible:
        return f"tick {tick} has no {way}: it is in ticks {', '.join(map(str, possible))}"
    return ""
