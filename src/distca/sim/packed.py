"""The time of a step without disaggregation: packed data and context parallelism, with 1F1B.

A *bin* is one micro-batch of one group of ``cp`` workers. Bins do not depend on each other, so all
of them are simulated side by side on virtual ranks; then the bins of a group follow one another
through its stages. Groups synchronize only at the end of the step: weights stay gathered, and
gradients are reduced once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from distca.pipeline.schedule import BACKWARD, FORWARD, Phase, micro_batch_name
from distca.pipeline.stages import stage_layers
from distca.planning.api import place_and_plan
from distca.planning.models import BYTES_PER_ELEMENT
from distca.planning.options import PlanOptions
from distca.planning.placement import Placement
from distca.planning.plan import Plan
from distca.planning.policies import POLICIES, policy_of
from distca.planning.spans import Floats, Ints, as_ints
from distca.sim.one_f_one_b import Timeline, one_f_one_b
from distca.sim.rates import Rates
from distca.sim.streams import Event, Streams
from distca.sim.ticks import run_tick, stage_elements

# Policies that keep the documents of a sequence together.
KEEP_SEQUENCES = tuple(
    name for name, policy in POLICIES.items() if not (policy.disaggregated or policy.repacks)
)


@dataclass(frozen=True, eq=False)
class PackedPlan:
    """The plan of all bins of a step; bin b is on virtual workers [b * cp, (b + 1) * cp)."""

    plan: Plan
    order: Ints  # [micro_batches, groups] the bin of each micro-batch and group

    @property
    def tokens(self) -> Ints:
        """The tokens of each bin, [bins]."""
        cp = self.plan.gather or 1
        total: Ints = self.plan.placement.tokens.reshape(-1, cp).sum(axis=1)
        return total


def pack(
    rates: Rates,
    sequences: Sequence[Ints],
    policy: str,
    micro_batches: int,
    *,
    mask: str = "causal",
) -> PackedPlan:
    """Packs sequences into bins, and plans their attention.

    sequences: the lengths of the documents in each sequence, in order of arrival.
    """
    p, lengths = rates.parallel, as_ints(np.concatenate(sequences))
    bins = p.dp * micro_batches
    if len(sequences) % bins and policy in KEEP_SEQUENCES:
        raise ValueError(
            f"{len(sequences)} sequences over dp {p.dp} x {micro_batches} micro-batches: they must"
            " divide evenly, so choose a smaller dp and a larger cp, or other micro-batches"
        )
    if len(lengths) < bins:
        raise ValueError(
            f"{len(lengths)} documents for dp {p.dp} x {micro_batches} micro-batches: each needs"
            " one or more, so choose a smaller dp, or fewer micro-batches"
        )
    number = np.arange(len(lengths), dtype=np.int64)
    owner = start = np.zeros_like(number)
    if policy in KEEP_SEQUENCES:
        counts = [len(sequence) for sequence in sequences]
        owner = np.repeat(np.arange(len(sequences)) * bins // len(sequences), counts)
    given = Placement(lengths, number, start, lengths, as_ints(owner * p.cp), bins * p.cp)
    options = PlanOptions(model=rates.share, cost=rates.cost, cp=p.cp, mask=mask)
    made = place_and_plan(given, policy_of(policy), options)
    order = np.arange(bins).reshape(micro_batches, p.dp)
    if policy not in KEEP_SEQUENCES:  # bins with about the same work run at the same time
        work = (made.forward_load_ps + made.backward_load_ps).reshape(bins, p.cp).sum(axis=1)
        order = np.argsort(work, kind="stable").reshape(micro_batches, p.dp)
        # The group with the lightest bin gets the heaviest one next.
        order[1::2] = order[1::2, ::-1]
    return PackedPlan(made, as_ints(order))


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
        self._virtual = replace(rates, parallel=replace(p, pp=1, dp=bins, servers=0))
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
        tokens = self._packed.plan.placement.tokens.reshape(-1, p.cp)[self._packed.order]
        num_bytes = tokens * (self._rates.shape.hidden * BYTES_PER_ELEMENT) // p.tp
        self.num_bytes += 2 * (p.pp - 1) * int(num_bytes.sum())
        most = num_bytes.max(axis=2).astype(np.float64)  # [micro_batches, groups]
        node = cluster.node(p.num_plan_ranks, p.tp).reshape(p.pp, p.dp, p.cp)
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
        attention = rates.attention(plan, backward=backward)
        seams = rates.seams(tokens, layers, head=last, backward=backward)
        run_tick(streams, phase, [[one] for one in seams], [[attention]] * layers)
        cp = self._rates.parallel.cp
        self.num_bytes += streams.num_bytes
        busy = streams.busy.reshape(-1, cp)[order]  # [micro_batches, groups, cp]
        self.busy[stage] += busy.sum(axis=0).reshape(-1)
        seconds: Floats = streams.compute.reshape(-1, cp).max(axis=1)
        return seconds[order]

    @property
    def _speed(self) -> Floats:
        """The speed of each rank, [stages, groups, cp]."""
        p = self._rates.parallel
        return self._rates.cluster.speed(p.num_plan_ranks, p.tp).reshape(p.pp, p.dp, p.cp)

    def _streams(self, stage: int, phase: Phase) -> Streams:
        """Returns streams of virtual workers, as fast as those of the group that runs their bin."""
        cluster, order = self._rates.cluster, self._packed.order
        speed = np.ones((order.size, self._rates.parallel.cp))
        speed[order] = self._speed[stage]
        return Streams(
            speed.reshape(-1),
            jitter=cluster.jitter,
            link_jitter=cluster.link_jitter,
            seed=(self._seed, stage, phase == BACKWARD),
        )


def events(timeline: Timeline, cp: int) -> list[Event]:
    """Returns the timeline as events of all ranks, stage by stage."""
    stages, micro_batches, groups = timeline.start[FORWARD].shape
    found = []
    for phase in (FORWARD, BACKWARD):
        for stage in range(stages):
            for m in range(micro_batches):
                start, stop = (np.zeros((stages, groups)) for _ in range(2))
                start[stage] = timeline.start[phase][stage, m]
                stop[stage] = timeline.stop[phase][stage, m]
                each = (np.repeat(times.reshape(-1), cp) for times in (start, stop))
                found.append(Event("compute", micro_batch_name(phase, m), *each))
    return found
