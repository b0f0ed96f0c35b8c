"""The time of a step without disaggregation: packed data and context parallelism, with 1F1B.

All bins (``sim.packing``) are simulated side by side on virtual ranks; then the bins of a group
follow one another through its stages. Groups synchronize only at the end of the step: weights stay
gathered, and gradients are reduced once.
"""

from dataclasses import replace

import numpy as np

from distca.pipeline.schedule import BACKWARD, FORWARD, Phase, micro_batch_name
from distca.pipeline.stages import stage_layers
from distca.planning.models import BYTES_PER_ELEMENT
from distca.planning.spans import Floats
from distca.sim.one_f_one_b import Timeline, one_f_one_b
from distca.sim.packing import PackedPlan
from distca.sim.rates import Rates
from distca.sim.streams import Event, Streams
from distca.sim.ticks import run_tick, stage_elements


class PackedStep:
    """One step of packed bins.

    busy: [stages, workers of a stage] seconds of computing, known after ``run``.
    num_bytes: bytes that are sent, known after ``run`` and ``weights_and_optimizer_s``.
    """

    def __init__(self, rates: Rates, packed: PackedPlan, *, seed: int = 0) -> None:
        self._rates, self._packed, self._seed = rates, packed, seed
        p = rates.parallel
        bins = packed.order.size
        # A mesh with as many groups as there are bins, so that all bins run at once.
        mesh = replace(p, pp=1, dp=bins, cp=packed.width, servers=0)
        self._virtual = replace(rates, parallel=mesh)
        self.busy = np.zeros((p.pp, p.dp * p.cp))
        self.num_bytes = 0

    def run(self) -> Timeline:
        """Returns when each micro-batch runs on each stage and group."""
        p, s = self._rates.parallel, self._rates.shape
        sizes = [stop - start for start, stop in stage_layers(s.layers, p.pp)]
        forward, backward = (
            np.stack([self._stage_s(stage, layers, phase) for stage, layers in enumerate(sizes)])
            for phase in (FORWARD, BACKWARD)
        )
        return one_f_one_b(forward, backward, self._p2p_s())

    def _p2p_s(self) -> Floats:
        """Returns seconds of sending activations, or their gradients, between stages."""
        p, cluster = self._rates.parallel, self._rates.cluster
        width = self._packed.width
        tokens = self._packed.plan.placement.tokens.reshape(-1, width)[self._packed.order]
        num_bytes = tokens * (self._rates.shape.hidden * BYTES_PER_ELEMENT) // p.tp
        self.num_bytes += 2 * (p.pp - 1) * int(num_bytes.sum())
        most = num_bytes.max(axis=2).astype(np.float64)  # [micro_batches, groups]
        node = cluster.node(p.num_plan_ranks, p.tp).reshape(p.pp, -1, width)
        near = (node[1:] == node[:-1]).all(axis=2)[:, None]  # [borders, 1, groups]
        return np.where(near, cluster.inside.seconds(most), cluster.across.seconds(most))

    def weights_and_optimizer_s(self, timeline: Timeline) -> float:
        """Returns the seconds that weights, gradients and the optimizer add to the step.

        Weights are gathered layer by layer during the first forward, and gradients reduced during
        the last backward. The share of one layer is exposed, or what these passes do not hide.
        """
        rates, elements = self._rates, stage_elements(self._rates)
        share_of_layer = rates.shape.layer_elements / max(elements, 1)
        added = float(self.optimizer_s.max())
        for transfer, phase, m in (
            (rates.gather_weights(elements), FORWARD, 0),
            (rates.reduce_gradients(elements), BACKWARD, -1),
        ):
            if transfer is not None:
                hidden = float((timeline.stop[phase] - timeline.start[phase])[:, m].min())
                seconds = float(transfer.seconds.max())
                added += max(seconds * share_of_layer, seconds - hidden)
                self.num_bytes += transfer.num_bytes
        return added

    @property
    def optimizer_s(self) -> Floats:
        """Seconds of the optimizer step on each rank."""
        return self._rates.optimizer_s / self._speed.reshape(-1)

    def _stage_s(self, stage: int, layers: int, phase: Phase) -> Floats:
        """Returns the seconds of every bin on one stage, [micro_batches, groups]."""
        rates, plan, order = self._virtual, self._packed.plan, self._packed.order
        streams = self._streams(stage, phase)
        tokens = plan.placement.tokens.astype(np.float64)
        backward, last = phase == BACKWARD, stage + 1 == self._rates.parallel.pp
        if self._packed.group_size is None:
            attention = rates.attention(plan, backward=backward)
        else:
            attention = rates.ring_attention(plan, self._packed.group_size, backward=backward)
        seams = rates.seams(tokens, layers, head=last, backward=backward)
        run_tick(streams, phase, [[one] for one in seams], [[attention]] * layers)
        width = self._packed.width
        self.num_bytes += streams.num_bytes
        busy = streams.busy.reshape(-1, width)[order]  # [micro_batches, groups, width]
        self.busy[stage] += busy.sum(axis=0).reshape(-1)
        seconds: Floats = streams.compute.reshape(-1, width).max(axis=1)
        return seconds[order]

    @property
    def _speed(self) -> Floats:
        """The speed of each rank, [stages, groups, width]."""
        p = self._rates.parallel
        speed = self._rates.cluster.speed(p.num_plan_ranks, p.tp)
        return speed.reshape(p.pp, -1, self._packed.width)

    def _streams(self, stage: int, phase: Phase) -> Streams:
        """Returns streams of virtual workers, as fast as those of the group that runs their bin."""
        cluster, order = self._rates.cluster, self._packed.order
        speed = np.ones((order.size, self._packed.width))
        speed[order] = self._speed[stage]
        return Streams.on(cluster, speed.reshape(-1), seed=(self._seed, stage, phase == BACKWARD))


def events(timeline: Timeline, width: int) -> list[Event]:
    """Returns the timeline as events of all ranks, stage by stage."""
    stages, micro_batches, groups = timeline.start[FORWARD].shape
    found = []
    for phase in (FORWARD, BACKWARD):
        for stage in range(stages):
            for m in range(micro_batches):
                start, stop = (np.zeros((stages, groups)) for _ in range(2))
                start[stage] = timeline.start[phase][stage, m]
                stop[stage] = timeline.stop[phase][stage, m]
                each = (np.repeat(times.reshape(-1), width) for times in (start, stop))
                found.append(Event("compute", micro_batch_name(phase, m), *each))
    return found
