"""Whether disaggregation pays: the best of its ways against the best of the others, and why not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from distca.planning.spans import Ints
from distca.sim.cluster import Link
from distca.sim.lower_bounds import attention_s
from distca.sim.packed import pack
from distca.sim.rates import Rates
from distca.sim.scenario import Batch, Scenario, Way
from distca.sim.simulate import Summary, simulate
from distca.sim.sweep import Found

PAYS = 1.02  # times as fast; less is within what a simulation can tell
LITTLE_ATTENTION = 0.15  # of the work: below it, evening it out cannot bring much
IDLE = 0.1  # of all GPUs' time: more is worth a reason
EVEN = 1.05  # the busiest worker's attention over the mean
NEAR = 1.05  # bandwidths are sought to so much


@dataclass(frozen=True)
class Verdict:
    """``ours`` and ``other``: the fastest that fit, disaggregated and not."""

    ours: Summary | None
    other: Summary | None
    attention: float = 0.0  # its share of the work
    busiest: float = 1.0  # the other's busiest worker: its attention over the mean
    because: str = ""  # it does not pay: links, slow GPUs, little attention, ...
    needed_bytes_per_s: float | None = None  # links between nodes with which it would pay

    @property
    def speed_up(self) -> float | None:
        if self.ours is None or self.other is None:
            return None
        return self.other.step_s / self.ours.step_s

    @property
    def pays(self) -> bool | None:
        return None if self.speed_up is None else self.speed_up > PAYS


def verdict(scenario: Scenario, found: Sequence[Found], batch: Batch) -> Verdict:
    """``batch``: one of those that were simulated, to look for reasons."""
    ours = _fastest(found, disaggregated=True)
    other = _fastest(found, disaggregated=False)
    if ours is None or other is None:
        return Verdict(ours, other)
    said = Verdict(
        ours,
        other,
        attention=attention_share(scenario, ours.way, batch),
        busiest=busiest(scenario, other.way, batch),
    )
    if said.pays:
        return said
    free_s = (1 - ours.exposed) * ours.step_s
    needed = None
    if other.step_s / free_s > PAYS:
        needed = needed_bandwidth(scenario, ours.way, other.way, batch)
    reasons = {
        "links": needed is not None or ours.exposed > IDLE,
        "slow": bool(scenario.cluster.slow) and ours.idle > IDLE,
        "attention": said.attention < LITTLE_ATTENTION,
        "even": said.busiest < EVEN,
        "little": other.idle < IDLE,
        "idle": True,
    }
    because = next(name for name, holds in reasons.items() if holds)
    return replace(said, because=because, needed_bytes_per_s=needed)


def _fastest(found: Sequence[Found], *, disaggregated: bool) -> Summary | None:
    known = [one.summary for one in found if one.summary is not None and one.fits]
    same = [one for one in known if one.way.disaggregated == disaggregated]
    return min(same, key=lambda one: one.step_s, default=None)


def attention_share(scenario: Scenario, way: Way, batch: Batch) -> float:
    """Of the seconds that all lanes compute, at the kernels' best rate."""
    rates = Rates(scenario.model, scenario.cluster, way.parallel, scenario.recompute)
    attention = attention_s(scenario, rates, batch)
    tokens = np.array([float(scenario.tokens)])
    linear = sum(
        float(part(tokens, backward=backward)[0]) * times
        for part, times in (
            (rates.before, scenario.model.layers),
            (rates.after, scenario.model.layers),
            (rates.head, 1),
        )
        for backward in (False, True)
    )
    return attention / (attention + linear)


def busiest(scenario: Scenario, way: Way, batch: Batch) -> float:
    """A packed way's busiest worker: its attention in a step over the mean of all."""
    rates = Rates(scenario.model, scenario.cluster, way.parallel, scenario.recompute)
    packed = pack(rates, batch, way.policy, way.micro_batches, mask=scenario.mask)
    work: Ints = packed.plan.forward_work_ps + packed.plan.backward_work_ps
    of_worker = work.reshape(-1, way.parallel.cp)[packed.order].sum(axis=0)  # [groups, cp]
    return float(of_worker.max() / of_worker.mean())


def needed_bandwidth(scenario: Scenario, ours: Way, other: Way, batch: Batch) -> float | None:
    """Bytes a second between nodes from which it would pay; None if it takes more than a node's."""

    known = {way: simulate(scenario, way, batch).planned for way in (ours, other)}

    def pays(bytes_per_s: float) -> bool:
        link = Link(bytes_per_s, scenario.cluster.across.latency_s)
        faster = replace(scenario, cluster=replace(scenario.cluster, across=link))
        a, b = (simulate(faster, way, batch, planned=plans).step_s for way, plans in known.items())
        return b / a > PAYS

    low, high = scenario.cluster.across.bytes_per_s, scenario.cluster.inside.bytes_per_s
    if low >= high or not pays(high):
        return None
    while high / low > NEAR:
        middle = float(np.sqrt(low * high))
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high
