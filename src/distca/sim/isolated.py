"""Simulates isolated ranks, as a replay on one device runs them, and compares the two.

The partners of an isolated rank are always ready. It runs a few layers without an output head,
without communication of weights and gradients, and without an optimizer step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean

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
from distca.planning.policies import policy_of
from distca.planning.spans import Floats, Ints
from distca.sim.cluster import Cluster, Link
from distca.sim.rates import Attention, Rates
from distca.sim.streams import Streams
from distca.sim.ticks import micro_batch_tokens, run_ticks

RANDOM = "random"  # the reason of ranks that are chosen at random


@dataclass(frozen=True)
class Case:
    """A large plan whose ranks are simulated and replayed one by one."""

    shape: ModelShape  # the layers that are run, as one tensor-parallel rank holds them
    masks: tuple[Mask, ...]  # of each layer
    ranks: int
    lengths: str  # a distribution of document lengths
    context: int  # tokens of the longest document
    tokens: int  # of each rank
    link: Link  # of each rank
    cost: str
    placement: str = "given"
    ping_pong: bool = True
    seed: int = 0
    element_bytes: int = BYTES_PER_ELEMENT  # of exchanged tensors

    def __post_init__(self) -> None:
        for what in ("ranks", "context", "tokens"):
            if getattr(self, what) < 1:
                raise ValueError(f"{what} = {getattr(self, what)}: give 1 or more")
        if self.context > self.ranks * self.tokens:
            raise ValueError(
                f"a context of {self.context} tokens on {self.ranks} ranks x {self.tokens} tokens:"
                " all ranks together must hold the longest document; give a smaller context, or"
                " more ranks or tokens"
            )
        policy_of("distca", self.placement)  # raises ValueError for an unknown placement

    def plan(self) -> StepPlan:
        """Draws a batch and plans it; with placement ``given``, documents are packed in order."""
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
    """Measured seconds over those of the cost model, of linear layers and of attention."""

    linear: float = 1.0
    attention: float = 1.0


UNCALIBRATED = Factors()


@dataclass(frozen=True)
class RankSeconds:
    """Seconds of one rank: of the step, of its exposed communication, and of its attention.

    host: how long the host took to launch the step; 0 in a simulation, where it takes no time.
    """

    step: float
    exposed: float
    attention: float
    host: float = 0.0

    @property
    def linear(self) -> float:
        """Seconds of everything else."""
        return self.step - self.exposed - self.attention


@dataclass(frozen=True, eq=False)
class IsolatedRanks:
    """All ranks of a plan, each simulated as an isolated rank; arrays are [ranks]."""

    step_s: Floats
    exposed_s: Floats
    attention_s: Floats
    tokens: Ints
    sent: Floats  # bytes of the exchanges of one layer, forward and backward
    received: Floats

    def seconds(self, rank: int) -> RankSeconds:
        arrays = (self.step_s, self.exposed_s, self.attention_s)
        return RankSeconds(*(float(each[rank]) for each in arrays))

    def sample(self, count: int, seed: int = 0) -> dict[int, str]:
        """Chooses ranks, with the reason of each: first the extreme ones, then random ones."""
        if min(count, len(self.step_s)) < 2:
            raise ValueError(
                f"a sample of {count} of {len(self.step_s)} ranks: give 2 or more, since some are"
                " for calibration and the others for validation"
            )
        extremes = {
            "most traffic": np.argmax(np.maximum(self.sent, self.received)),
            "most attention": np.argmax(self.attention_s),
            "slowest": np.argmax(self.step_s),
            "fastest": np.argmin(self.step_s),
        }
        chosen: dict[int, str] = {}
        for why, rank in extremes.items():
            chosen.setdefault(int(rank), why)
        for rank in np.random.default_rng(seed).permutation(len(self.step_s)).tolist():
            chosen.setdefault(rank, RANDOM)
        return dict(list(chosen.items())[:count])


def simulate_isolated(case: Case, step: StepPlan, factors: Factors = UNCALIBRATED) -> IsolatedRanks:
    """Simulates every rank of the case's plan as an isolated rank."""
    # Nodes have one rank, so that all bytes go over one kind of link.
    link = replace(
        case.link, bytes_per_s=case.link.bytes_per_s * BYTES_PER_ELEMENT / case.element_bytes
    )
    cluster = Cluster("isolated", case.ranks, 1, 0, inside=link, across=link, profile=case.cost)
    shape = replace(case.shape, vocab_size=0)  # without an output head
    rates = _IsolatedRates(
        shape, cluster, MeshShape(cp=case.ranks), recompute=True, factors=factors
    )
    streams = Streams(np.ones(case.ranks), isolated=True, record=True)
    run_ticks(rates, step, streams)
    attended = [e.stop - e.start for e in streams.events or () if e.what.startswith("attention")]
    traffic = [
        plan.backward_traffic if backward else plan.traffic for plan, backward in step.passes
    ]
    scale = case.element_bytes / BYTES_PER_ELEMENT / case.shape.layers
    return IsolatedRanks(
        step_s=streams.compute,
        exposed_s=streams.waited,
        attention_s=np.sum(attended, axis=0),
        tokens=micro_batch_tokens(step, 0),
        sent=np.sum([one.send for one in traffic], axis=0) * scale,
        received=np.sum([one.recv for one in traffic], axis=0) * scale,
    )


@dataclass(frozen=True)
class _IsolatedRates(Rates):
    """Calibrated rates without communication of weights and without an optimizer step."""

    factors: Factors = UNCALIBRATED

    @cached_property
    def cost(self) -> CostModel:
        """Any cost model, since without an optimizer step no profile is needed."""
        return cost_model(self.cluster.profile, self.share)

    def attention(self, plan: Plan, *, backward: bool) -> Attention:
        found, factor = super().attention(plan, backward=backward), self.factors.attention
        return replace(found, local_s=found.local_s * factor, remote_s=found.remote_s * factor)

    def _linear(self, tokens: Floats, elements: float, collectives: int, backward: bool) -> Floats:
        return super()._linear(tokens, elements, collectives, backward) * self.factors.linear

    def gather_weights(self, elements: int) -> None:
        return None

    def reduce_gradients(self, elements: int) -> None:
        return None

    @property
    def optimizer_s(self) -> float:
        return 0.0


# -- comparison with a replay ---------------------------------------------------------------------


@dataclass(frozen=True)
class RankComparison:
    """One rank, replayed and simulated."""

    rank: int
    why: str  # the reason for which it was chosen
    calibrates: bool  # used to fit the factors, and not to state the error
    tokens: int
    sent_bytes: float  # of one layer
    received_bytes: float
    measured: RankSeconds
    simulated: RankSeconds
    calibrated: RankSeconds  # simulated with the fitted factors


@dataclass(frozen=True)
class Comparison:
    """Sampled ranks of a plan, replayed and simulated.

    Errors are stated on ranks that are not used to fit the factors. Means are over the ranks that
    were chosen at random, if there are any.
    """

    rows: tuple[RankComparison, ...]
    factors: Factors
    raw: dict[str, float]  # mean and worst relative error of simulated steps without the factors
    calibrated: dict[str, float]  # the same with the factors
    step_s: float  # measured mean
    exposed_s: float  # measured mean
    host_s: float  # measured mean
    worst_over_mean: float  # measured, of the slowest sampled rank
    simulated_worst_over_mean: float  # over all ranks of the plan
    imbalance_before: float  # of attention, as planned
    imbalance: float


def compare(
    case: Case, step: StepPlan, sample: Mapping[int, str], measured: Mapping[int, RankSeconds]
) -> Comparison:
    """Fits factors to the last third of the sample, and compares the others with them."""
    raw, ranks = simulate_isolated(case, step), list(sample)
    calibrating = ranks[-max(len(ranks) // 3, 1) :]
    factors = fit([(raw.seconds(rank), measured[rank]) for rank in calibrating])
    corrected = simulate_isolated(case, step, factors)
    rows = tuple(
        RankComparison(
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
    validation = [row for row in rows if not row.calibrates]

    def errors(side: str) -> dict[str, float]:
        found = [abs(getattr(row, side).step / row.measured.step - 1) for row in validation]
        return {"mean": fmean(found), "worst": max(found)}

    typical = [row.measured for row in rows if row.why == RANDOM] or list(measured.values())
    mean = fmean(one.step for one in typical)
    return Comparison(
        rows=rows,
        factors=factors,
        raw=errors("simulated"),
        calibrated=errors("calibrated"),
        step_s=mean,
        exposed_s=fmean(one.exposed for one in typical),
        host_s=fmean(one.host for one in typical),
        worst_over_mean=max(row.measured.step for row in rows) / mean,
        simulated_worst_over_mean=float(raw.step_s.max() / raw.step_s.mean()),
        imbalance_before=step.imbalance_before,
        imbalance=step.imbalance,
    )


def fit(pairs: Sequence[tuple[RankSeconds, RankSeconds]]) -> Factors:
    """Fits factors to pairs of simulated and measured seconds by least squares.

    Attention and linear layers are fitted separately. Whole steps could not tell them apart, since
    a balanced plan gives all ranks about the same amount of both.
    """

    def factor(simulated: list[float], measured: list[float]) -> float:
        squares = float(np.dot(simulated, simulated))
        found = float(np.dot(simulated, measured)) / squares if squares else 1.0
        return found if found > 0 else 1.0  # tiny runs are noisy

    return Factors(
        linear=factor([a.linear for a, _ in pairs], [b.linear for _, b in pairs]),
        attention=factor([a.attention for a, _ in pairs], [b.attention for _, b in pairs]),
    )
