"""A disaggregated step in time: the ticks of a step plan, on all lanes at once."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from distca.pipeline.schedule import FORWARD, Tick
from distca.pipeline.step_plan import StepPlan
from distca.planning.plan import Plan
from distca.planning.spans import Floats, Ints, as_ints
from distca.sim.crossing import Weights, cross
from distca.sim.rates import Attention, Rates
from distca.sim.streams import Exchange, Streams


class Ticks:
    """Runs a step plan on streams."""

    def __init__(self, rates: Rates, step: StepPlan, streams: Streams) -> None:
        self._rates, self._step, self._streams = rates, step, streams
        self._known: dict[tuple[int, bool], Attention] = {}  # of the plans, which ``step`` keeps
        self._sent: dict[tuple[str, int, int], Floats] = {}  # by phase, stage and micro-batch

    def run(self) -> None:
        streams, rates, ticks = self._streams, self._rates, self._step.schedule.ticks
        once = rates.parallel.gathers_once
        if once:  # layer by layer: the first is waited for, the others run under the first tick
            layer = rates.shape.layer_elements
            others = stage_elements(rates) - layer
            streams.wait(streams.send("weights", rates.gathering(layer)))
            streams.send("weights", rates.gathering(others))
        for number, tick in enumerate(ticks):
            weights = None if once else self._weights(tick)
            if once and number + 1 == len(ticks):
                streams.send("gradients", rates.reducing(others))
            self._receive(tick)
            slots = [
                [self._attention(plan, tick.phase != FORWARD) for plan in slot]
                for slot in self._step.slots[number]
            ]
            cross(streams, self._parts(tick, len(slots)), slots, weights)
            self._pass_on(tick)
        if once:
            streams.send("gradients", rates.reducing(layer))
        streams.wait(streams.port)
        workers = np.arange(rates.lanes) < rates.parallel.pp * rates.parallel.workers_per_stage
        streams.run("optimizer", np.where(workers, rates.optimizer_s, 0.0))

    def _weights(self, tick: Tick) -> Weights:
        """Gathered for every tick; the gradients of every micro-batch are reduced."""
        gathering, reducing = self._seams
        if tick.phase == FORWARD:
            return Weights(self._streams, gathering)
        return Weights(self._streams, gathering[::-1], reducing[::-1])

    @cached_property
    def _seams(self) -> tuple[list[Exchange | None], list[Exchange | None]]:
        rates, elements = self._rates, seam_elements(self._rates)
        known = {count: (rates.gathering(count), rates.reducing(count)) for count in set(elements)}
        return [known[count][0] for count in elements], [known[count][1] for count in elements]

    def _attention(self, plan: Plan, backward: bool) -> Attention:
        key = (id(plan), backward)
        if key not in self._known:
            self._known[key] = self._rates.attention(plan, backward=backward)
        return self._known[key]

    def _parts(self, tick: Tick, slots: int) -> list[list[Floats]]:
        """Seconds of the linear layers of every seam and half, [slots + 1][halves]."""
        rates, width = self._rates, self._rates.parallel.workers_per_stage
        halves = len(self._step.micro_batches[0])
        parts = [[np.zeros(rates.lanes) for _ in range(halves)] for _ in range(slots + 1)]
        backward = tick.phase != FORWARD
        for stage, micro_batch in enumerate(tick.micro_batches):
            if micro_batch is None:
                continue
            start, stop = self._step.stages[stage]
            layers = self._step.backward_slots[stage] if backward else stop - start
            lanes = slice(stage * width, (stage + 1) * width)
            for half, placed in enumerate(self._step.micro_batches[micro_batch]):
                tokens = placed.placement.tokens.astype(np.float64)
                before = rates.before(tokens, backward=backward)
                after = rates.after(tokens, backward=backward)
                enter, leave = (after, before) if backward else (before, after)
                for seam in range(layers):
                    parts[seam][half][lanes] += enter
                    parts[seam + 1][half][lanes] += leave
                if stage + 1 == len(self._step.stages):
                    end = 0 if backward else layers
                    parts[end][half][lanes] += rates.head(tokens, backward=backward)
        return parts

    def _receive(self, tick: Tick) -> None:
        """What the stage before, or behind, has sent."""
        done = np.zeros(self._rates.lanes)
        width = self._rates.parallel.workers_per_stage
        for stage, micro_batch in enumerate(tick.micro_batches):
            if micro_batch is None:
                continue
            came = self._sent.pop((tick.phase, stage, micro_batch), None)
            if came is not None:
                lanes = slice(stage * width, (stage + 1) * width)
                done[lanes] = came[lanes]
        self._streams.wait(done)

    def _pass_on(self, tick: Tick) -> None:
        """To the next stage, or to the one before."""
        stages = len(self._step.stages)
        step = 1 if tick.phase == FORWARD else -1
        going = [
            (stage, stage + step, micro_batch)
            for stage, micro_batch in enumerate(tick.micro_batches)
            if micro_batch is not None and 0 <= stage + step < stages
        ]
        if not going:
            return
        place = np.arange(self._rates.parallel.workers_per_stage)
        rows = [
            (held(self._step, m), a * len(place) + place, b * len(place) + place)
            for a, b, m in going
        ]
        columns = (as_ints(np.concatenate(column)) for column in zip(*rows, strict=True))
        exchange = self._rates.passing_on(*columns)
        done = self._streams.send("activations", exchange)
        for _, stage, micro_batch in going:
            self._sent[tick.phase, stage, micro_batch] = done


def held(step: StepPlan, micro_batch: int) -> Ints:
    """Tokens of a micro-batch on every worker of a stage, both halves together."""
    return as_ints(np.sum([half.placement.tokens for half in step.micro_batches[micro_batch]], 0))


def seam_elements(rates: Rates) -> list[int]:
    """Weights of every seam of a model without a pipeline: what a rank gathers at once."""
    s = rates.shape
    before = s.hidden * (s.heads + 2 * s.kv_heads) * s.head_dim
    inner = [s.layer_elements] * (s.layers - 1)
    return [s.end_elements + before, *inner, s.layer_elements - before + s.end_elements]


def stage_elements(rates: Rates) -> int:
    """Weights of a pipeline's stage, the largest of them: with one end of the model."""
    s, pp = rates.shape, rates.parallel.pp
    ends = 2 * s.end_elements if pp == 1 else s.end_elements
    return -(-s.layers // pp) * s.layer_elements + ends
