"""Ways to train the same batches on the same ranks, for comparisons with real steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from torch import Tensor

from distca.attention.core import CoreAttention
from distca.data.documents import Batch
from distca.dispatch.meter import Meter
from distca.model.config import ModelConfig
from distca.model.initialize import initialize
from distca.model.llama import on_meta
from distca.pipeline.mesh import MeshShape
from distca.pipeline.step_plan import StepPlan
from distca.pipeline.step_planner import StepPlanner
from distca.planning.costs.choice import cost_model
from distca.planning.options import PlanOptions
from distca.planning.policies import policy_of
from distca.runtime.batches import Step
from distca.runtime.mesh import RankContext
from distca.runtime.parallelize import Precision, parallelize
from distca.runtime.prepared import PreparedTicks
from distca.runtime.step import StepRunner
from distca.train.config import TrainSection
from distca.train.optimizer import adamw, clip

TRAIN = TrainSection(lr=1e-4)
# Tokens of a rank over the mean, for policies that place unevenly; the first that can be kept.
LIMITS: Mapping[str, Sequence[float]] = {"kk": (1.25, 1.5, 2.0, 4.0)}


class Way(NamedTuple):
    """How a side places and plans.

    ``dynamic-cp`` has one micro-batch: every document is on a group of its own size, and the keys
    that its ranks need are sent by distca's exchange. In Megatron-Core, groups of different sizes
    are micro-batches of their own, which takes more kernels and no fewer bytes.

    cp: all ranks may share a document, or each has documents of its own.
    rows: a step has one micro-batch for each rank, of about as many tokens as the longest document,
        so that head-tail chunks are those of a row, as published, and not of all rows together.
    """

    policy: str
    placement: str = "given"
    ping_pong: bool = False
    cp: bool = False
    rows: bool = False


WAYS: Mapping[str, Way] = {
    "colocated": Way("colocated"),
    "wlb": Way("wlb"),
    "head-tail-cp": Way("head-tail-cp", cp=True, rows=True),
    "per-document-cp": Way("per-document-cp", cp=True),
    "kk": Way("kk"),
    "dynamic-cp": Way("dynamic-cp", cp=True),
    "given": Way("distca"),
    "given+ping-pong": Way("distca", ping_pong=True),
    "balanced": Way("distca", "balanced"),
    "balanced+ping-pong": Way("distca", "balanced", ping_pong=True),
}


class Ready(Protocol):
    """A step whose plans are made; ``run`` is what is timed."""

    def run(self) -> Tensor:
        """Computes gradients; returns this rank's part of the mean loss."""
        ...


class Side:
    """A model and an optimizer that are trained in one way."""

    def __init__(self, config: ModelConfig, context: RankContext, precision: Precision) -> None:
        self.context = context
        self.model = on_meta(config)
        parallelize(self.model, context, precision)
        initialize(self.model, seed=0, device=context.device)
        self.optimizer = adamw(self.model, TRAIN)

    @property
    def meters(self) -> list[Meter]:
        """What measures attention, and communication that nothing hides."""
        return []

    def prepare(self, batch: Batch) -> Ready:
        raise NotImplementedError

    def plan_of(self, ready: Ready) -> StepPlan | None:
        """Returns what the simulator needs to predict the step."""
        return None

    def update(self) -> None:
        clip(self.model, TRAIN.clip, self.context.pipeline_group)
        self.optimizer.step()
        self.optimizer.zero_grad()


def planners(
    way: Way,
    config: ModelConfig,
    ranks: int,
    tokens: int,
    cost: str,
    *,
    recompute: bool,
    limits: Mapping[str, Sequence[float]] = LIMITS,
) -> list[StepPlanner]:
    """Returns planners of a side, the first of which is used where it can be.

    tokens: of a rank, on average.
    recompute: whether linear layers run a second time in the backward pass.
    limits: as LIMITS.
    """
    masks = tuple(config.mask_of(layer) for layer in range(config.layers))
    parallel = MeshShape(cp=ranks, keep_weights=way.rows) if way.cp else MeshShape(dp=ranks)
    shape = config.shape
    flops = (4 if recompute else 3) * shape.linear_flops_per_token
    options = PlanOptions(
        model=shape,
        cost=cost,
        cp=ranks if way.cp else 1,
        token_s=flops / (cost_model(cost, shape).linear_tflops * 1e12),
    )
    choices = [
        replace(options, max_tokens=int(limit * tokens)) for limit in limits.get(way.policy, ())
    ]
    return [
        StepPlanner(
            parallel,
            masks,
            chosen,
            policy_of(way.policy, way.placement),
            micro_batches=ranks if way.rows else 1,
            ping_pong=way.ping_pong,
        )
        for chosen in choices or [options]
    ]


def plan_step(choices: Sequence[StepPlanner], batch: Batch) -> Step:
    """Plans a step with the first planner that can; raises ValueError if none can."""
    for planner in choices[:-1]:
        with suppress(ValueError):  # documents do not fit under this limit of tokens
            return Step.of(planner, batch)
    return Step.of(choices[-1], batch)


@dataclass(frozen=True, eq=False)
class PlannedStep:
    side: PlannedSide
    step: Step
    prepared: PreparedTicks  # as in training, where it is made with the plan in the background

    def run(self) -> Tensor:
        return self.side.runner.train(self.side.model, self.step, self.prepared)


class PlannedSide(Side):
    """A side of distca's runtime.

    attentions: of ping and pong, the same ones for all sides, so that exchange buffers are shared.
    """

    def __init__(
        self,
        config: ModelConfig,
        context: RankContext,
        precision: Precision,
        choices: Sequence[StepPlanner],
        attentions: tuple[CoreAttention, CoreAttention],
        *,
        recompute: bool,
    ) -> None:
        # dp and cp are one axis of the device mesh, so no process groups are needed.
        super().__init__(config, replace(context, parallel=choices[0].parallel), precision)
        self.choices = choices
        halves = attentions[: 1 + choices[0].ping_pong]
        self.runner = StepRunner(self.context, halves, recompute, precision.compute)

    @property
    def meters(self) -> list[Meter]:
        return [attention.meter for attention in self.runner.attentions]

    def prepare(self, batch: Batch) -> PlannedStep:
        return self.prepare_planned(plan_step(self.choices, batch))

    def prepare_planned(self, step: Step) -> PlannedStep:
        self.runner.warm_up(self.model, step.plan)
        return PlannedStep(self, step, self.runner.prepare(step.plan))

    def plan_of(self, ready: Ready) -> StepPlan | None:
        assert isinstance(ready, PlannedStep)
        return ready.step.plan
