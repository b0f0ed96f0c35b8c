"""The time of a tick, and of a disaggregated step, on all ranks at once.

A tick walks the tick program that the runtime executes; a step runs the ticks of a step plan.
"""

from collections.abc import Sequence
from functools import cache

import numpy as np

from distca.pipeline.schedule import FORWARD, Phase, Tick, micro_batch_name
from distca.pipeline.step_plan import StepPlan
from distca.pipeline.tick_program import HALF_NAMES, TickProgram
from distca.planning.spans import Floats, Ints, as_ints
from distca.sim.rates import Attention, Rates
from distca.sim.streams import Streams, Transfer


def run_tick(
    streams: Streams,
    phase: Phase,
    linear_s: Sequence[Sequence[Floats]],
    attention: Sequence[Sequence[Attention]],
    gathers: Sequence[Transfer | None] = (),
    reduces: Sequence[Transfer | None] = (),
) -> None:
    """Runs one tick.

    linear_s: seconds of the linear layers, [seams][halves] in the order of execution.
    attention: the attention of each slot, [seams - 1][halves].
    gathers, reduces: transfers of the weights of each seam, which are gathered one seam ahead, and
        of its gradients, which are reduced behind it; empty if there are none in this tick.
    """
    slots, halves = len(attention), len(linear_s[0])
    assert len(linear_s) == slots + 1
    arrival: dict[int, Floats] = {}  # when the transfer in progress of each half is done
    gathered = [streams.send("weights", one) for one in gathers[:1]]
    for section in TickProgram.of(slots, halves, phase).sections:
        seam = section[0].seam
        if gathers and seam is not None:
            gathered += [streams.send("weights", one) for one in gathers[seam + 1 : seam + 2]]
            streams.wait(gathered[seam])
        for operation in section:
            half, slot = operation.half, operation.slot
            name = f", {HALF_NAMES[half]}" if halves > 1 else ""
            if slot is None:
                assert seam is not None
                streams.run(f"linear{name}", linear_s[seam][half])
                continue
            one = attention[slot][half]
            match operation.kind:
                case "dispatch":
                    arrival[half] = streams.send(f"dispatch{name}", one.dispatch)
                case "compute":
                    streams.run(f"attention, local{name}", one.local_s)
                    streams.wait(arrival[half])
                    streams.run(f"attention{name}", one.remote_s)
                    arrival[half] = streams.send(f"combine{name}", one.combine)
                case "combine":
                    streams.wait(arrival[half])
        if reduces and seam is not None:
            streams.send("gradients", reduces[seam])


def run_ticks(rates: Rates, step: StepPlan, streams: Streams) -> None:
    """Runs the ticks of a step plan, and the optimizer step, on streams."""
    _Step(rates, step, streams).run()


class _Step:
    """A step in progress."""

    def __init__(self, rates: Rates, step: StepPlan, streams: Streams) -> None:
        self._rates, self._step, self._streams = rates, step, streams
        self._attention = cache(rates.attention)
        self._gather, self._reduce = cache(rates.gather_weights), cache(rates.reduce_gradients)
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
        for number, (tick, slots) in enumerate(zip(ticks, self._step.slots, strict=True), 1):
            if once and number == len(ticks):
                streams.send("gradients", rates.reduce_gradients(others))
            begin = streams.compute
            self._receive(tick)
            backward = tick.phase != FORWARD
            attention = [
                [self._attention(one, backward=backward) for one in slot] for slot in slots
            ]
            linear_s = self._linear_s(tick, seams=len(attention) + 1)
            transfers = ((), ()) if once else self._seam_transfers(tick)
            run_tick(streams, tick.phase, linear_s, attention, *transfers)
            self._send(tick)
            if len(ticks) > 2:
                self._mark(number - 1, tick, begin)
        if once:
            streams.send("gradients", rates.reduce_gradients(layer))
        streams.wait(streams.port)
        workers = np.arange(rates.num_ranks) < rates.parallel.pp * rates.parallel.workers_per_stage
        streams.run("optimizer", np.where(workers, rates.optimizer_s, 0.0))

    def _mark(self, number: int, tick: Tick, begin: Floats) -> None:
        """Records which micro-batch each rank has run in a tick."""
        for stage, micro_batch in enumerate(tick.micro_batches):
            name = "serves" if micro_batch is None else micro_batch_name(tick.phase, micro_batch)
            self._streams.mark(f"{name}, tick {number}", begin, self._ranks(stage))
        servers = slice(self._ranks(len(tick.micro_batches)).start, None)
        self._streams.mark(f"serves, tick {number}", begin, servers)

    def _seam_transfers(self, tick: Tick) -> tuple[list[Transfer | None], list[Transfer | None]]:
        """Returns gathers of weights in every tick, and reductions in backward ticks."""
        elements = seam_elements(self._rates)
        if tick.phase == FORWARD:
            return [self._gather(n) for n in elements], []
        elements.reverse()
        return [self._gather(n) for n in elements], [self._reduce(n) for n in elements]

    def _ranks(self, stage: int) -> slice:
        width = self._rates.parallel.workers_per_stage
        return slice(stage * width, (stage + 1) * width)

    def _linear_s(self, tick: Tick, seams: int) -> list[list[Floats]]:
        """Returns seconds of the linear layers, [seams][halves] in the order of execution."""
        step, backward = self._step, tick.phase != FORWARD
        seconds = np.zeros((seams, len(step.micro_batches[0]), self._rates.num_ranks))
        for stage, micro_batch in tick.running:
            start, stop = step.stages[stage]
            layers = step.backward_slots[stage] if backward else stop - start
            last = stage + 1 == len(step.stages)
            for half, placed in enumerate(step.micro_batches[micro_batch]):
                tokens = placed.placement.tokens.astype(np.float64)
                found = self._rates.seams(tokens, layers, head=last, backward=backward)
                seconds[: len(found), half, self._ranks(stage)] = found
        return [list(seam) for seam in seconds]

    def _receive(self, tick: Tick) -> None:
        """Waits for the activations or gradients of the neighbouring stages."""
        done = np.zeros(self._rates.num_ranks)
        for stage, micro_batch in tick.running:
            arrival = self._arrival.pop((tick.phase, stage, micro_batch), None)
            if arrival is not None:
                done[self._ranks(stage)] = arrival[self._ranks(stage)]
        self._streams.wait(done)

    def _send(self, tick: Tick) -> None:
        """Sends activations to the next stage, or gradients to the one before."""
        way, stages = 1 if tick.phase == FORWARD else -1, len(self._step.stages)
        leaving = [(stage, m) for stage, m in tick.running if 0 <= stage + way < stages]
        tokens = np.zeros(self._rates.num_ranks, np.int64)
        for stage, micro_batch in leaving:
            tokens[self._ranks(stage)] = micro_batch_tokens(self._step, micro_batch)
        source = np.flatnonzero(tokens)
        target = source + way * self._rates.parallel.workers_per_stage
        transfer = self._rates.send_activations(tokens[source], source, target)
        done = self._streams.send("activations", transfer)
        for stage, micro_batch in leaving:
            self._arrival[tick.phase, stage + way, micro_batch] = done


def micro_batch_tokens(step: StepPlan, micro_batch: int) -> Ints:
    """Returns the tokens of a micro-batch on each worker of a stage, both halves together."""
    return as_ints(np.sum([half.placement.tokens for half in step.micro_batches[micro_batch]], 0))


def seam_elements(rates: Rates) -> list[int]:
    """Returns the number of weights of each seam of a model without a pipeline."""
    s = rates.shape
    before = s.elements_before
    inner = [s.layer_elements] * (s.layers - 1)
    return [s.end_elements + before, *inner, s.layer_elements - before + s.end_elements]


def stage_elements(rates: Rates) -> int:
    """Returns the number of weights of the largest stage, which has an end of the model."""
    s, pp = rates.shape, rates.parallel.pp
    ends = 2 * s.end_elements if pp == 1 else s.end_elements
    return -(-s.layers // pp) * s.layer_elements + ends
