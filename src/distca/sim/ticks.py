"""The time of a disaggregated step: runs the ticks of a step plan on all ranks at once."""

from functools import cached_property

import numpy as np

from distca.pipeline.schedule import FORWARD, Tick
from distca.pipeline.step_plan import StepPlan
from distca.planning.plan import Plan
from distca.planning.spans import Floats, Ints, as_ints
from distca.sim.rates import Attention, Rates
from distca.sim.streams import Streams, Transfer
from distca.sim.tick import Weights, run_tick


def run_ticks(rates: Rates, step: StepPlan, streams: Streams) -> None:
    """Runs the ticks of a step plan, and the optimizer step, on streams."""
    _Step(rates, step, streams).run()


class _Step:
    """A step in progress."""

    def __init__(self, rates: Rates, step: StepPlan, streams: Streams) -> None:
        self._rates, self._step, self._streams = rates, step, streams
        self._attention_of: dict[tuple[int, bool], Attention] = {}  # by id of a plan and direction
        # When activations or gradients have arrived, by phase, stage and micro-batch.
        self._arrival: dict[tuple[str, int, int], Floats] = {}

    def run(self) -> None:
        streams, rates, ticks = self._streams, self._rates, self._step.schedule.ticks
        once = rates.parallel.gathers_once
        if once:  # the step waits for the first layer; the others arrive during the first tick
            layer = rates.shape.layer_elements
            others = stage_elements(rates) - layer
            streams.wait(streams.send("weights", rates.gather_weights(layer)))
            streams.send("weights", rates.gather_weights(others))
        for number, tick in enumerate(ticks):
            weights = None if once else self._weights(tick)
            if once and number + 1 == len(ticks):
                streams.send("gradients", rates.reduce_gradients(others))
            self._receive(tick)
            attention = [
                [self._attention(plan, tick.phase != FORWARD) for plan in slot]
                for slot in self._step.slots[number]
            ]
            linear_s = self._linear_s(tick, seams=len(attention) + 1)
            run_tick(streams, tick.phase, linear_s, attention, weights)
            self._send(tick)
        if once:
            streams.send("gradients", rates.reduce_gradients(layer))
        streams.wait(streams.port)
        workers = np.arange(rates.num_ranks) < rates.parallel.pp * rates.parallel.workers_per_stage
        streams.run("optimizer", np.where(workers, rates.optimizer_s, 0.0))

    def _weights(self, tick: Tick) -> Weights:
        """Gathers weights in every tick, and reduces gradients in every backward tick."""
        gathers, reduces = self._seam_transfers
        if tick.phase == FORWARD:
            return Weights(self._streams, gathers)
        return Weights(self._streams, gathers[::-1], reduces[::-1])

    @cached_property
    def _seam_transfers(self) -> tuple[list[Transfer | None], list[Transfer | None]]:
        """The gathers and the reductions of each seam, in the order of the forward pass."""
        rates, elements = self._rates, seam_elements(self._rates)
        gathers = {count: rates.gather_weights(count) for count in set(elements)}
        reduces = {count: rates.reduce_gradients(count) for count in set(elements)}
        return [gathers[count] for count in elements], [reduces[count] for count in elements]

    def _attention(self, plan: Plan, backward: bool) -> Attention:
        key = (id(plan), backward)
        if key not in self._attention_of:
            self._attention_of[key] = self._rates.attention(plan, backward=backward)
        return self._attention_of[key]

    def _linear_s(self, tick: Tick, seams: int) -> list[list[Floats]]:
        """Returns seconds of the linear layers, [seams][halves] in the order of execution."""
        rates, width = self._rates, self._rates.parallel.workers_per_stage
        halves = len(self._step.micro_batches[0])
        seconds = [[np.zeros(rates.num_ranks) for _ in range(halves)] for _ in range(seams)]
        backward = tick.phase != FORWARD
        for stage, micro_batch in enumerate(tick.micro_batches):
            if micro_batch is None:
                continue
            start, stop = self._step.stages[stage]
            layers = self._step.backward_slots[stage] if backward else stop - start
            ranks = slice(stage * width, (stage + 1) * width)
            for half, placed in enumerate(self._step.micro_batches[micro_batch]):
                tokens = placed.placement.tokens.astype(np.float64)
                before = rates.before(tokens, backward=backward)
                after = rates.after(tokens, backward=backward)
                enter, leave = (after, before) if backward else (before, after)
                for seam in range(layers):
                    seconds[seam][half][ranks] += enter
                    seconds[seam + 1][half][ranks] += leave
                if stage + 1 == len(self._step.stages):
                    end = 0 if backward else layers
                    seconds[end][half][ranks] += rates.head(tokens, backward=backward)
        return seconds

    def _receive(self, tick: Tick) -> None:
        """Waits for the activations or gradients of the neighbouring stages."""
        done = np.zeros(self._rates.num_ranks)
        width = self._rates.parallel.workers_per_stage
        for stage, micro_batch in enumerate(tick.micro_batches):
            if micro_batch is None:
                continue
            arrival = self._arrival.pop((tick.phase, stage, micro_batch), None)
            if arrival is not None:
                ranks = slice(stage * width, (stage + 1) * width)
                done[ranks] = arrival[ranks]
        self._streams.wait(done)

    def _send(self, tick: Tick) -> None:
        """Sends activations to the next stage, or gradients to the one before."""
        stages = len(self._step.stages)
        step = 1 if tick.phase == FORWARD else -1
        sends = [
            (stage, stage + step, micro_batch)
            for stage, micro_batch in enumerate(tick.micro_batches)
            if micro_batch is not None and 0 <= stage + step < stages
        ]
        if not sends:
            return
        worker = np.arange(self._rates.parallel.workers_per_stage)
        rows = [
            (micro_batch_tokens(self._step, m), a * len(worker) + worker, b * len(worker) + worker)
            for a, b, m in sends
        ]
        columns = (as_ints(np.concatenate(column)) for column in zip(*rows, strict=True))
        transfer = self._rates.send_activations(*columns)
        done = self._streams.send("activations", transfer)
        for _, stage, micro_batch in sends:
            self._arrival[tick.phase, stage, micro_batch] = done


def micro_batch_tokens(step: StepPlan, micro_batch: int) -> Ints:
    """Returns the tokens of a micro-batch on each worker of a stage, both halves together."""
    return as_ints(np.sum([half.placement.tokens for half in step.micro_batches[micro_batch]], 0))


def seam_elements(rates: Rates) -> list[int]:
    """Returns the number of weights of each seam of a model without a pipeline."""
    s = rates.shape
    before = s.hidden * (s.heads + 2 * s.kv_heads) * s.head_dim
    inner = [s.layer_elements] * (s.layers - 1)
    return [s.end_elements + before, *inner, s.layer_elements - before + s.end_elements]


def stage_elements(rates: Rates) -> int:
    """Returns the number of weights of the largest stage, which has an end of the model."""
    s, pp = rates.shape, rates.parallel.pp
    ends = 2 * s.end_elements if pp == 1 else s.end_elements
    return -(-s.layers // pp) * s.layer_elements + ends
