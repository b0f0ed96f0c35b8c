"""The sides of ``cluster_gpu.py``: ways to train the same batches on the same ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor.experimental import context_parallel

from distca.attention.core import CoreAttention
from distca.data.documents import Batch
from distca.model.config import ModelConfig
from distca.model.initialize import initialize
from distca.model.llama import Arriving, on_meta, plainly
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
    """How a side of distca's own runtime places and plans.

    ``dynamic-cp`` has one micro-batch: every document is on a group of its own size, and the keys
    that its ranks need are sent by distca's exchange. In Megatron-Core, groups of different sizes
    are micro-batches of their own, which takes more kernels and no fewer bytes.

    cp: all ranks may share a document, or each has documents of its own.
    rows: a step has one micro-batch for each rank, of about ``context`` tokens, so that head-tail
        chunks are those of a row, as published, and not of all rows together.
    """

    policy: str
    placement: str = "given"
    ping_pong: bool = False
    cp: bool = False
    rows: bool = False


TORCH_CP = "torch-cp"
BASELINE = "packed-dp"
WAYS: Mapping[str, Way | None] = {
    BASELINE: Way("colocated"),
    "wlb": Way("wlb"),
    "head-tail-cp": Way("head-tail-cp", cp=True, rows=True),
    "per-document-cp": Way("per-document-cp", cp=True),
    "kk": Way("kk"),
    "dynamic-cp": Way("dynamic-cp", cp=True),
    TORCH_CP: None,
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

    def prepare(self, batch: Batch) -> Ready:
        raise NotImplementedError

    def plan_of(self, ready: Ready) -> StepPlan | None:
        """Returns what the simulator needs to predict the step."""
        return None

    def update(self) -> None:
        clip(self.model, TRAIN.clip, self.context.pipeline_group)
        self.optimizer.step()
        self.optimizer.zero_grad()


# -- distca's runtime --------------------------------------------------------------------------


def planners(
    way: Way,
    config: ModelConfig,
    ranks: int,
    context: int,
    cost: str,
    *,
    recompute: bool,
    limits: Mapping[str, Sequence[float]] = LIMITS,
) -> list[StepPlanner]:
    """Returns planners of a side, the first of which is used where it can be.

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
        replace(options, max_tokens=int(limit * context)) for limit in limits.get(way.policy, ())
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
    """Plans a step with the first planner that can."""
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

    def prepare(self, batch: Batch) -> PlannedStep:
        step = plan_step(self.choices, batch)
        self.runner.warm_up(self.model, step.plan)
        return PlannedStep(self, step, self.runner.prepare(step.plan))

    def plan_of(self, ready: Ready) -> StepPlan | None:
        assert isinstance(ready, PlannedStep)
        return ready.step.plan


# -- PyTorch's context parallelism -------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class TorchStep:
    side: TorchContextParallel
    rows: tuple[Tensor, Tensor, Tensor]  # tokens, positions and labels, [rows, context]
    num_targets: int

    def run(self) -> Tensor:
        side, rows = self.side, [one.to(self.side.context.device) for one in self.rows]
        mesh = side.context.shard_mesh
        with context_parallel(
            mesh, buffers=rows, buffer_seq_dims=[1] * 3, no_restore_buffers={*rows}
        ):
            tokens, positions, labels = (one.flatten() for one in rows)
            arriving = Arriving(tokens, positions, labels=labels)
            attend = plainly(lambda layer, q, k, v: side.attend(q, k, v, len(rows[0])))
            (leaving,) = side.model([arriving], attend, recompute=side.recompute)
            assert leaving.loss is not None
            loss = leaving.loss.total / self.num_targets
            loss.backward()
        return loss.detach()


class TorchContextParallel(Side):
    """``torch.distributed.tensor.experimental.context_parallel`` with SDPA, as it ships.

    It knows no documents: a row of ``context`` tokens is one causal sequence, which all ranks
    share. So it computes attention across documents, and its loss is another one.
    """

    def __init__(
        self,
        config: ModelConfig,
        context: RankContext,
        precision: Precision,
        row_tokens: int,
        *,
        recompute: bool,
    ) -> None:
        self.grouped = grouped_heads(config, context, precision.compute)
        self.row_tokens, self.recompute = row_tokens, recompute
        super().__init__(config, context, precision)

    def prepare(self, batch: Batch) -> TorchStep:
        columns = [[d.tokens for d in batch.documents], [d.labels for d in batch.documents]]
        tokens, labels = (
            torch.from_numpy(np.concatenate(column)).view(-1, self.row_tokens) for column in columns
        )
        positions = torch.arange(self.row_tokens).expand_as(tokens).contiguous()
        return TorchStep(self, (tokens, positions, labels), batch.num_targets)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, num_rows: int) -> Tensor:
        """q [T, H, D], k and v [T, G, D] of some rows -> [T, H, D]."""
        out = sdpa(*(_heads_first(one, num_rows) for one in (q, k, v)), grouped=self.grouped)
        return out.transpose(1, 2).flatten(0, 1)


def _heads_first(x: Tensor, num_rows: int) -> Tensor:
    return x.unflatten(0, (num_rows, -1)).transpose(1, 2)


def sdpa(q: Tensor, k: Tensor, v: Tensor, *, grouped: bool) -> Tensor:
    if grouped:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    k, v = (one.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for one in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def grouped_heads(config: ModelConfig, context: RankContext, dtype: torch.dtype) -> bool:
    """Returns whether this torch takes fewer heads of keys than of queries, tried on few tokens.

    Raises ValueError if it cannot run at all, as on the CPU.
    """
    reasons = []
    for grouped in (True, False):
        mesh, tokens = context.shard_mesh, 256 * context.shard_mesh.size()
        buffer = torch.zeros(1, tokens, device=context.device)
        q, k, v = (
            torch.randn(
                1,
                heads,
                256,
                config.head_dim,
                dtype=dtype,
                device=context.device,
                requires_grad=True,
            )
            for heads in (config.heads, config.kv_heads, config.kv_heads)
        )
        try:
            with context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[1]):
                out = sdpa(q, k, v, grouped=grouped)
                out.sum().backward()
        except Exception as error:  # whatever an experimental interface raises, on all ranks alike
            reasons.append(f"{type(error).__name__}: {str(error).splitlines()[0][:200]}")
        else:
            return grouped
    raise ValueError(reasons[-1])
