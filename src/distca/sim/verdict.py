"""Whether disaggregation helps: its best strategy against the best of the others."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import sqrt
from statistics import fmean, stdev

import numpy as np

from distca.planning.spans import Ints
from distca.sim.cluster import Link
from distca.sim.lower_bounds import attention_s
from distca.sim.packing import pack
from distca.sim.rates import Rates
from distca.sim.scenario import Batch, Scenario, Strategy
from distca.sim.simulate import Summary, simulate
from distca.sim.sweep import SweepResult

ERROR = 0.02  # speed-ups this close to 1 are within the error of a simulation
LITTLE_ATTENTION = 0.15  # the fraction of the work below which balancing attention gains little
IDLE = 0.1  # the fraction of all GPUs' time above which being idle is a reason
EVEN = 1.05  # attention of the busiest worker over the mean, up to which there is balance already
BANDWIDTH_FACTOR = 1.05  # the precision of the search for a bandwidth


@dataclass(frozen=True)
class Verdict:
    """Whether disaggregation helps, and why not."""

    ours: Summary | None  # the fastest strategy with disaggregation that fits into memory
    other: Summary | None  # the fastest one without
    attention: float = 0.0  # the fraction of attention in the work
    busiest: float = 1.0  # attention of the busiest worker of ``other`` over the mean of all
    because: str = ""  # why it does not help: one of the reasons in ``verdict``
    needed_bytes_per_s: float | None = None  # the bandwidth between nodes from which it helps
    enough: Summary | None = None  # kk, where no strategy is faster by more than its noise

    @property
    def speed_up(self) -> float | None:
        if self.ours is None or self.other is None:
            return None
        return self.other.step_s / self.ours.step_s

    @property
    def noise(self) -> float:
        """The error of the speed-up: two standard errors of its mean over batches, or ``ERROR``."""
        if self.ours is None or self.other is None or len(self.ours.batch_step_s) < 2:
            return ERROR
        each = batch_speed_ups(self.other, self.ours)
        return max(2 * stdev(each) / sqrt(len(each)), ERROR)

    @property
    def gain(self) -> str:
        """``faster``, ``slower``, or ``even`` where the speed-up is within its noise.

        It is judged with the two digits that are shown, so equal figures get equal verdicts. Empty
        if there is nothing to compare.
        """
        if self.speed_up is None:
            return ""
        difference, noise = round(self.speed_up - 1, 2), round(self.noise, 2)
        return "even" if abs(difference) <= noise else "faster" if difference > 0 else "slower"

    @property
    def is_unclear(self) -> bool:
        """Whether only the noise hides a difference, so that more batches may show it."""
        assert self.speed_up is not None
        return self.gain == "even" and abs(round(self.speed_up - 1, 2)) > ERROR


def batch_speed_ups(other: Summary, ours: Summary) -> list[float]:
    """Returns the speed-up over another strategy on each batch; both ran on the same batches."""
    pairs = zip(other.batch_step_s, ours.batch_step_s, strict=True)
    return [other_s / ours_s for other_s, ours_s in pairs]


def verdict(
    scenario: Scenario, results: Sequence[SweepResult], batches: Sequence[Batch]
) -> Verdict:
    """Compares the best strategies on the simulated batches."""
    ours = _fastest(results, disaggregated=True)
    other = _fastest(results, disaggregated=False)
    if ours is None or other is None:
        return Verdict(ours, other)
    result = Verdict(
        ours,
        other,
        attention=attention_share(scenario, ours.strategy, batches),
        busiest=fmean(busiest(scenario, other.strategy, batch) for batch in batches),
    )
    if result.gain == "faster":
        return result
    result = replace(result, enough=_whole_documents(results, result))
    if result.is_unclear:
        return replace(result, because="noise")
    free_s = (1 - ours.exposed) * ours.step_s
    needed = None
    if other.step_s / free_s > 1 + ERROR:
        needed = needed_bandwidth(scenario, ours.strategy, other.strategy, batches)
    reasons = {
        "links": needed is not None or ours.exposed > IDLE,
        "slow": bool(scenario.cluster.slow) and ours.idle > IDLE,
        "attention": result.attention < LITTLE_ATTENTION,
        "even": result.busiest < EVEN,
        "little": other.idle < IDLE,
        "idle": True,
    }
    because = next(name for name, holds in reasons.items() if holds)
    return replace(result, because=because, needed_bytes_per_s=needed)


def _fastest(results: Sequence[SweepResult], *, disaggregated: bool) -> Summary | None:
    summaries = [one.summary for one in results if one.summary is not None and one.fits]
    same = [one for one in summaries if one.strategy.disaggregated == disaggregated]
    return min(same, key=lambda one: one.step_s, default=None)


def _whole_documents(results: Sequence[SweepResult], judged: Verdict) -> Summary | None:
    """Returns policy kk if it is as fast as the best of the others, and None otherwise."""
    for one in results:
        found = one.summary
        if found is not None and one.fits and found.strategy.policy == "kk":
            assert judged.other is not None
            slower = found.step_s / judged.other.step_s - 1
            return found if round(slower, 2) <= ERROR else None
    return None


def attention_share(scenario: Scenario, strategy: Strategy, batches: Sequence[Batch]) -> float:
    """Returns the fraction of attention in the seconds of computing, at the kernels' best rate."""
    rates = Rates(scenario.model, scenario.cluster, strategy.parallel, scenario.recompute)
    attention = fmean(attention_s(scenario, rates, batch) for batch in batches)
    layer, head = rates.layer_and_head_s(scenario.tokens)
    return attention / (attention + scenario.model.layers * layer + head)


def busiest(scenario: Scenario, strategy: Strategy, batch: Batch) -> float:
    """Returns attention of the busiest worker over the mean, without disaggregation."""
    rates = Rates(scenario.model, scenario.cluster, strategy.parallel, scenario.recompute)
    packed = pack(
        rates,
        batch,
        strategy.policy,
        strategy.micro_batches,
        mask=scenario.mask,
        tolerance=strategy.tolerance,
    )
    work: Ints = packed.plan.forward_load_ps + packed.plan.backward_load_ps
    of_worker = work.reshape(-1, packed.width)[packed.order].sum(axis=0)  # [groups, width]
    return float(of_worker.max() / of_worker.mean())


def needed_bandwidth(
    scenario: Scenario, ours: Strategy, other: Strategy, batches: Sequence[Batch]
) -> float | None:
    """Returns the bandwidth between nodes from which it helps; None above that inside."""

    plans = {
        strategy: [simulate(scenario, strategy, batch).planned for batch in batches]
        for strategy in (ours, other)
    }

    def helps(bytes_per_s: float) -> bool:
        link = Link(bytes_per_s, scenario.cluster.across.latency_s)
        faster = replace(scenario, cluster=replace(scenario.cluster, across=link))
        our_s, other_s = (
            sum(
                simulate(faster, strategy, batch, planned=plan).step_s
                for batch, plan in zip(batches, planned, strict=True)
            )
            for strategy, planned in plans.items()
        )
        return other_s / our_s > 1 + ERROR

    low, high = scenario.cluster.across.bytes_per_s, scenario.cluster.inside.bytes_per_s
    if low >= high or not helps(high):
        return None
    while high / low > BANDWIDTH_FACTOR:
        middle = float(np.sqrt(low * high))
        low, high = (low, middle) if helps(middle) else (middle, high)
    return high
