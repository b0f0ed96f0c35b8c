"""Ranks of a plan one by one, as a replay on one device runs them, and how the two compare.

A rank by itself has partners that are always ready and one port for all that it sends and takes.
It runs a few layers without an output head; no weights travel, and none are updated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import Any

import numpy as np

from distca.data.lengths import distribution
from distca.pipeline.mesh import MeshShape
from distca.pipeline.step_plan import StepPlan
from distca.pipeline.step_planner import StepPlanner
from distca.planning.costs.base import CostModel
from distca.planning.costs.choice import cost_model
from distca.planning.masks import Mask
from distca.planning.models import BYTES_PER_ELEMENT, ModelShape
from distca.planning.options import PlanOptions
from distca.planning.plan import Plan
from distca.planning.policies import PLACEMENTS, policy_of
from distca.planning.spans import Floats, Ints
from distca.sim.cluster import Cluster, Link
from distca.sim.rates import Attention, Rates
from distca.sim.streams import Streams
from distca.sim.ticks import Ticks, held

RANDOM = "random"  # why a rank was chosen, if for nothing else


@dataclass(frozen=True)
class Case:
    """A large plan, of which single ranks are looked at."""

    shape: ModelShape  # as many layers as are run, and what one tensor-parallel rank has of them
    masks: tuple[Mask, ...]  # by layer
    ranks: int
    lengths: str  # a distribution
    context: int  # of the longest document
    tokens: int  # of a rank
    link: Link  # of a rank
    cost: str
    placement: str = "given"
    ping_pong: bool = True
    seed: int = 0
    element_bytes: int = BYTES_PER_ELEMENT  # of what travels

    def __post_init__(self) -> None:
        for what in ("ranks", "context", "tokens"):
            if getattr(self, what) < 1:
                raise ValueError(f"{what} = {getattr(self, what)}: give 1 or more")
        if self.context > self.ranks * self.tokens:
            raise ValueError(
                f"a context of {self.context} tokens on {self.ranks} ranks x {self.tokens} tokens:"
                " all ranks together must hold the longest document; take a smaller context, or"
                " more of either"
            )
        if self.placement not in PLACEMENTS:
            raise ValueError(
                f"placement {self.placement!r} is unknown: choose {' or '.join(PLACEMENTS)}"
            )

    def plan(self) -> StepPlan:
        """Documents in order over all ranks, if ``placement`` is given."""
        drawn = distribution(self.lengths, self.context)
        planner = StepPlanner(
            parallel=MeshShape(cp=self.ranks),
            masks=self.masks,
            options=PlanOptions(model=self.shape, cost=self.cost),
            policy=policy_of("distca", self.placement),
            ping_pong=self.ping_pong,
        )
        return planner.plan(drawn.batch(self.ranks * self.tokens, self.seed))


@dataclass(frozen=True)
class Factors:
    """How many times as long as the cost model says things really take."""

    linear: float = 1.0
    attention: float = 1.0


AS_PRICED = Factors()


@dataclass(frozen=True)
class Seconds:
    """Of one rank: all, what waits for what is under way, and what attends."""

    step: float
    exposed: float
    attention: float

    @property
    def linear(self) -> float:
        """All the rest."""
        return self.step - self.exposed - self.attention


@dataclass(frozen=True, eq=False)
class Alone:
    """Every rank of a plan by itself, [ranks] each."""

    step_s: Floats
    exposed_s: Floats
    attention_s: Floats
    tokens: Ints
    sent: Floats  # bytes of a layer, there and back, forward and backward
    received: Floats

    def seconds(self, rank: int) -> Seconds:
        arrays = (self.step_s, self.exposed_s, self.attention_s)
        return Seconds(*(float(each[rank]) for each in arrays))

    @property
    def worst_over_mean(self) -> float:
        return float(self.step_s.max() / self.step_s.mean())

    def sample(self, count: int, seed: int = 0) -> dict[int, str]:
        """Ranks, each with why it was chosen: those at the ends of what is known, then any."""
        if min(count, len(self.step_s)) < 2:
            raise ValueError(
                f"a sample of {count} of {len(self.step_s)} ranks: take 2 or more, as some"
                " calibrate and the others are held to it"
            )
        ends = {
            "most traffic": np.argmax(np.maximum(self.sent, self.received)),
            "most attention": np.argmax(self.attention_s),
            "slowest": np.argmax(self.step_s),
            "fastest": np.argmin(self.step_s),
        }
        chosen: dict[int, str] = {}
        for why, rank in ends.items():
            chosen.setdefault(int(rank), why)
        for rank in np.random.default_rng(seed).permutation(len(self.step_s)).tolist():
            chosen.setdefault(rank, RANDOM)
        return dict(list(chosen.items())[:count])


def alone(case: Case, step: StepPlan, factors: Factors = AS_PRICED) -> Alone:
    """Simulates all ranks of the case's plan."""
    # Nodes of one rank, so that all bytes go over one kind of link.
    link = replace(
        case.link, bytes_per_s=case.link.bytes_per_s * BYTES_PER_ELEMENT / case.element_bytes
    )
    cluster = Cluster("alone", case.ranks, 1, 0, inside=link, across=link, profile=case.cost)
    shape = replace(case.shape, vocab_size=0)  # without a head
    rates = _Rates(shape, cluster, MeshShape(cp=case.ranks), recompute=True, factors=factors)
    streams = Streams(np.ones(case.ranks), alone=True, record=True)
    Ticks(rates, step, streams).run()
    attended = [e.stop - e.start for e in streams.events or () if e.what.startswith("attention")]
    traffic = [
        plan.backward_traffic if backward else plan.traffic for plan, backward in step.passes
    ]
    times = case.element_bytes / BYTES_PER_ELEMENT / case.shape.layers
    return Alone(
        step_s=streams.compute,
        exposed_s=streams.waited,
        attention_s=np.sum(attended, axis=0),
        tokens=held(step, 0),
        sent=np.sum([one.send for one in traffic], axis=0) * times,
        received=np.sum([one.recv for one in traffic], axis=0) * times,
    )


@dataclass(frozen=True)
class _Rates(Rates):
    """Corrected; no weights travel, and none are updated."""

    factors: Factors = AS_PRICED

    @cached_property
    def cost(self) -> CostModel:
        """By a profile, or not: without an optimizer a replay needs no more of one."""
        return cost_model(self.cluster.profile, self.share)

    def attention(self, plan: Plan, *, backward: bool) -> Attention:
        found, times = super().attention(plan, backward=backward), self.factors.attention
        return replace(found, local_s=found.local_s * times, remote_s=found.remote_s * times)

    def _linear(self, tokens: Floats, elements: float, exchanges: int, backward: bool) -> Floats:
        return super()._linear(tokens, elements, exchanges, backward) * self.factors.linear

    def gathering(self, elements: int) -> None:
        return None

    def reducing(self, elements: int) -> None:
        return None

    @property
    def optimizer_s(self) -> float:
        return 0.0


# -- against what was measured -------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One rank."""

    rank: int
    why: str  # it was chosen
    calibrates: bool  # and is then not held against the simulation
    tokens: int
    sent_bytes: float  # of a layer
    received_bytes: float
    measured: Seconds
    simulated: Seconds
    calibrated: Seconds  # simulated with the factors


@dataclass(frozen=True)
class Error:
    """Of simulated step times, relative to measured ones."""

    mean: float
    worst: float

    @classmethod
    def of(cls, pairs: Iterable[tuple[Seconds, Seconds]]) -> Error:
        """(simulated, measured)"""
        off = [abs(said.step / true.step - 1) for said, true in pairs]
        return cls(fmean(off), max(off))


@dataclass(frozen=True)
class Comparison:
    """Sampled ranks of a plan. Means are over those that were drawn at random, if there are any."""

    rows: tuple[Row, ...]
    factors: Factors
    raw: Error  # of ranks that did not calibrate, simulated as priced
    calibrated: Error  # likewise, with the factors
    step_s: float  # measured, mean
    exposed_s: float
    worst_over_mean: float  # measured, of all that were sampled over the mean
    simulated_worst_over_mean: float  # of all ranks of the plan
    imbalance_before: float  # of attention alone, as planned
    imbalance: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def compare(
    case: Case, step: StepPlan, sample: Mapping[int, str], measured: Mapping[int, Seconds]
) -> Comparison:
    """The last third of the sample calibrates; the others, extremes first, are held to it."""
    raw, ranks = alone(case, step), list(sample)
    calibrating = ranks[-max(len(ranks) // 3, 1) :]
    factors = fit([(raw.seconds(rank), measured[rank]) for rank in calibrating])
    corrected = alone(case, step, factors)
    rows = tuple(
        Row(
            rank=rank,
            why=why,
            calibrates=rank in calibrating,
            tokens=int(raw.tokens[rank]),
            sent_bytes=float(raw.sent[rank]),
            received_bytes=float(raw.received[rank]),
            measured=measured[rank],
            simulated=raw.seconds(rank),
            calibrated=corrected.seconds(rank),
        )
        for rank, why in sample.items()
    )
    held_out = [row for row in rows if not row.calibrates]
    usual = [row.measured for row in rows if row.why == RANDOM] or list(measured.values())
    mean = fmean(one.step for one in usual)
    return Comparison(
        rows=rows,
        factors=factors,
        raw=Error.of((row.simulated, row.measured) for row in held_out),
        calibrated=Error.of((row.calibrated, row.measured) for row in held_out),
        step_s=mean,
        exposed_s=fmean(one.exposed for one in usual),
        worst_over_mean=max(row.measured.step for row in rows) / mean,
        simulated_worst_over_mean=raw.worst_over_mean,
        imbalance_before=step.imbalance_before,
        imbalance=step.imbalance,
    )


def fit(pairs: Sequence[tuple[Seconds, Seconds]]) -> Factors:
    """Least squares over (simulated, measured), attention and the rest each by itself.

    Not both at once from whole steps: a balanced plan gives all ranks about the same of both.
    """

    def times(said: list[float], true: list[float]) -> float:
        squares = float(np.dot(said, said))
        found = float(np.dot(said, true)) / squares if squares else 1.0
        return found if found > 0 else 1.0  # noise of tiny runs

    return Factors(
        linear=times([said.linear for said, _ in pairs], [true.linear for _, true in pairs]),
        attention=times(
            [said.attention for said, _ in pairs], [true.attention for _, true in pairs]
        ),
    )
