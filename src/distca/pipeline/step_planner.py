"""A global batch -> micro-batches -> halves, placed once and planned tick by tick.

Everything here follows from the batch alone, so every rank makes the same plans by itself.

In a tick the attention of all stages is one pool over all ranks of one tp index. It has as many
slots as the stage with most layers to go: in slot n a stage attends with its n-th layer, counted
from its first one forward and from its last one backward, and whoever has none left joins empty.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import numpy as np

from distca.pipeline.mesh import MeshShape
from distca.pipeline.packing import by_group, filled, split
from distca.pipeline.pool import masks_of, pooled
from distca.pipeline.schedule import FORWARD, Phase, Schedule, Tick
from distca.pipeline.stages import Layers, backward_layers, stage_layers
from distca.pipeline.step_plan import Half, Slot, StepPlan
from distca.planning.api import plan as make_plan
from distca.planning.costs.base import OneDirectionCost
from distca.planning.costs.choice import cost_model
from distca.planning.costs.profile import DEFAULT_COST
from distca.planning.devices import Devices
from distca.planning.masks import Mask
from distca.planning.models import ModelShape
from distca.planning.placement import Placement
from distca.planning.plan import Plan
from distca.planning.policies import KEEP_PLACEMENT, POLICIES
from distca.planning.spans import Floats, Ints, as_ints

Masks = tuple[Mask | None, ...]  # by stage; None where it brings no documents


@dataclass(frozen=True)
class StepPlanner:
    """How batches are split, placed and planned."""

    parallel: MeshShape
    shape: ModelShape  # the whole model's heads
    masks: tuple[Mask, ...]  # by layer
    micro_batches: int = 1
    ping_pong: bool = False
    placement: str = "given"
    policy: str = "distca"
    layers: tuple[int, ...] = ()  # of each stage; an even split by default
    first_trained_part: int = 0  # of the model that learns (see ``pipeline.stages``)
    speed: tuple[float, ...] = ()  # of each rank of a plan; all alike by default
    ranks_per_node: int | None = None  # of a plan
    options: Mapping[str, Any] = field(default_factory=dict)  # others of ``distca.plan``

    def __post_init__(self) -> None:
        stage_layers(len(self.masks), self.parallel.pp, self.layers)
        lanes = self.parallel.num_plan_ranks
        if self.speed and len(self.speed) != lanes:
            raise ValueError(
                f"{len(self.speed)} speeds for {lanes} ranks of a plan: give one for each, or none"
            )
        if self.policy not in POLICIES:
            raise ValueError(
                f"policy {self.policy!r} is unknown: choose one of {', '.join(POLICIES)}"
            )
        if self.parallel.pp > 1 and self.policy not in KEEP_PLACEMENT:
            raise ValueError(
                f"policy {self.policy} places tokens itself, which stages of a pipeline cannot each"
                f" do: with pp = {self.parallel.pp} take one of {', '.join(KEEP_PLACEMENT)}"
            )

    @property
    def stages(self) -> tuple[Layers, ...]:
        return stage_layers(len(self.masks), self.parallel.pp, self.layers)

    def plan(self, lengths: Ints, *, learn: bool = True) -> StepPlan:
        """Of a batch's documents. ``learn``: forward and backward; else forward alone."""
        lengths, made, each = as_ints(lengths), _Made(self), 1 + self.ping_pong
        sets = split(lengths, self.micro_batches * each)
        if self.ping_pong:  # halves with about equal attention meet
            sets.sort(key=lambda members: float(np.sum(lengths[members] ** 2.0)))
        halves = [made.half(members, lengths[members]) for members in sets]
        micro_batches = tuple(
            tuple(halves[first : first + each]) for first in range(0, len(halves), each)
        )
        schedule = Schedule.aligned if learn else Schedule.forward_only
        ticks = schedule(self.parallel.pp, self.micro_batches)
        slots = tuple(tuple(made.slots(tick, micro_batches)) for tick in ticks.ticks)
        return StepPlan(
            schedule=ticks,
            micro_batches=micro_batches,
            slots=slots,
            stages=self.stages,
            first_trained_part=self.first_trained_part,
        )

    def layer(self, stage: int, slot: int, phase: Phase) -> int | None:
        """The one whose attention a stage brings to a slot, if it has one left."""
        start, stop = self.stages[stage]
        if phase == FORWARD:
            return start + slot if start + slot < stop else None
        going = backward_layers((start, stop), self.first_trained_part)
        return stop - 1 - slot if slot < going else None


class _Made:
    """The plans of one step; equal pools are planned once."""

    def __init__(self, planner: StepPlanner) -> None:
        self._planner = planner
        self._shape = planner.shape.share(planner.parallel.tp)
        self._options = dict(planner.options)
        self._cost = cost_model(self._options.pop("cost", DEFAULT_COST), self._shape)
        self._speed = np.asarray(planner.speed or np.ones(planner.parallel.num_plan_ranks))
        self._known: dict[Any, Plan] = {}
        self._widest = max(planner.masks, key=lambda mask: mask.reach)
        self._placing: dict[Placement, Plan] = {}  # those that came with a placement

    def half(self, members: Ints, lengths: Ints) -> Half:
        """Placed on the workers of one stage, each with a multiple of tp tokens."""
        r = self._planner
        placement = by_group(lengths, r.parallel.dp, r.parallel.cp, multiple=r.parallel.tp)
        if r.placement == "balanced" or r.policy not in KEEP_PLACEMENT:
            # Where fillers or other stages join them, tasks are planned later: not here too.
            later = r.parallel.tp > 1 or r.parallel.pp > 1
            policy = r.policy
            if later and policy in KEEP_PLACEMENT and not r.parallel.servers:
                policy = "colocated"
            options = {"placement": r.placement, "policy": policy, "servers": self._one_stage()}
            plan = self._plan(placement, self._widest, **options)
            if not later:
                self._placing[plan.placement] = plan
            placement = filled(plan.placement, r.parallel.tp)
        return Half(members, placement)

    def slots(self, tick: Tick, micro_batches: Sequence[Sequence[Half]]) -> Iterator[Slot]:
        r = self._planner
        for slot in count():
            masks: Masks = tuple(
                None if m is None or layer is None else r.masks[layer]
                for m, layer in (
                    (m, r.layer(stage, slot, tick.phase))
                    for stage, m in enumerate(tick.micro_batches)
                )
            )
            if not any(masks):
                return
            yield tuple(
                self._pool(tick, half, masks, micro_batches) for half in range(1 + r.ping_pong)
            )

    def _pool(
        self, tick: Tick, half: int, masks: Masks, micro_batches: Sequence[Sequence[Half]]
    ) -> Plan:
        # Without a pipeline forward and backward have the same pool, and one plan serves both.
        alone = self._planner.parallel.pp == 1
        key = (None if alone else tick.phase, tick.micro_batches, half, masks)
        if key not in self._known:
            stages = [
                None if m is None or mask is None else micro_batches[m][half].placement
                for m, mask in zip(tick.micro_batches, masks, strict=True)
            ]
            self._known[key] = self._planned(tick, stages, masks, alone)
        return self._known[key]

    def _planned(
        self, tick: Tick, stages: Sequence[Placement | None], masks: Masks, alone: bool
    ) -> Plan:
        if alone and stages[0] in self._placing and masks == (self._widest,):
            return self._placing[stages[0]]
        tokens = pooled(stages, self._planner.parallel.workers_per_stage)
        plan = self._plan(
            tokens,
            masks_of(stages, masks),
            servers=self._servers(tick, stages),
            cost=self._cost if alone else OneDirectionCost(self._cost, tick.phase != FORWARD),
        )
        if plan.placement is not tokens:
            raise ValueError(
                f"policy {plan.policy} places tokens itself, for one mask: with tp or layers of"
                f" several masks take one of {', '.join(KEEP_PLACEMENT)}"
            )
        return plan

    def _plan(self, tokens: Placement, mask: Mask | Sequence[Mask], **more: Any) -> Plan:
        options: dict[str, Any] = {"policy": self._planner.policy, "cost": self._cost}
        options |= self._options | more
        return make_plan(tokens, model=self._shape, mask=mask, **options)

    def _servers(self, tick: Tick, stages: Sequence[Placement | None]) -> Devices:
        """Stages without a micro-batch are free to serve, also beside a dedicated pool."""
        parallel = self._planner.parallel
        dedicated = parallel.servers // parallel.tp
        idle = np.repeat([m is None for m in tick.micro_batches], parallel.workers_per_stage)
        serves = idle | (dedicated == 0)
        return Devices.of(
            len(idle),
            dedicated,
            workers_serve=True,
            speed=self._speed * np.concatenate([serves, np.ones(dedicated)]),
            busy_s=np.concatenate([self._busy_s(tick, stages), np.zeros(dedicated)]),
            ranks_per_node=self._planner.ranks_per_node,
        )

    def _one_stage(self) -> Devices:
        """As placements see it, which are the same for every stage; each place as on average."""
        parallel = self._planner.parallel
        workers = parallel.pp * parallel.workers_per_stage
        stages = self._speed[:workers].reshape(parallel.pp, parallel.workers_per_stage)
        return Devices.of(
            parallel.workers_per_stage,
            parallel.servers // parallel.tp,
            speed=np.concatenate([stages.mean(axis=0), self._speed[workers:]]),
            ranks_per_node=self._planner.ranks_per_node,
        )

    def _busy_s(self, tick: Tick, stages: Sequence[Placement | None]) -> Floats:
        """What linear layers leave of each worker's time in a slot.

        Only where halves take turns: a half's attention then has all the time in which the other
        half's linear layers run. With one half nobody's attention begins before they are done.
        """
        r = self._planner
        none = np.zeros(r.parallel.workers_per_stage, np.int64)
        tokens: Ints = np.concatenate([none if p is None else p.tokens for p in stages])
        if not r.ping_pong or r.parallel.pp == 1:
            return np.zeros(len(tokens))
        flops = r.shape.linear_flops_per_token / r.parallel.tp * (1 if tick.phase == FORWARD else 2)
        return np.asarray(tokens * (flops / (self._cost.linear_tflops * 1e12)), np.float64)


def evaluating(planner: StepPlanner) -> StepPlanner:
    """The same mesh with one micro-batch of one half."""
    return replace(planner, micro_batches=1, ping_pong=False)
