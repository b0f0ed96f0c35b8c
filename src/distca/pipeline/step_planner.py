"""Plans a global batch: micro-batches, halves, their placement, and a plan for every slot.

Everything follows from the lengths of the documents, so every rank makes the same plans without
communication.

The attention of all pipeline stages in one tick is one pool over all ranks of one tensor-parallel
index. A tick has as many attention slots as the stage with the most layers to run: in slot n each
stage attends with its n-th layer, counted from its first layer in forward and from its last one in
backward. A stage without a layer left contributes no documents to the slot and only serves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import count

import numpy as np

from distca.pipeline.halves import groups_then_halves, halves_then_groups
from distca.pipeline.mesh import MeshShape
from distca.pipeline.packing import pack_in_groups, pad_to_multiple
from distca.pipeline.pool import pool_masks, pool_placements
from distca.pipeline.schedule import BACKWARD, FORWARD, Phase, Schedule, Tick
from distca.pipeline.stages import Layers, backward_layers, stage_layers
from distca.pipeline.step_plan import Half, Slot, StepPlan
from distca.planning.api import place_to_plan, plan
from distca.planning.costs.base import CostModel
from distca.planning.costs.choice import cost_model
from distca.planning.masks import Mask
from distca.planning.options import PlanOptions
from distca.planning.placement import Placement
from distca.planning.placers.candidates import Placed
from distca.planning.plan import Plan
from distca.planning.policies import POLICIES, Policy
from distca.planning.spans import Bools, Floats, Ints, as_ints

StageMasks = tuple[Mask | None, ...]  # the mask of each stage's layer; None without a layer
# The placement of each stage's documents and the given one, as in ``Half``; None without any.
StagePlacements = tuple[tuple[Placement, Placement] | None, ...]
PlacedHalves = dict[Placement, Placed]  # what the placer has done, by placement
PlanPool = Callable[[Tick, StagePlacements, StageMasks], Plan]  # for one half


@dataclass(frozen=True)
class StepPlanner:
    """Splits, places and plans the global batches of a training run.

    parallel: the mesh; its servers replace ``options.servers``.
    masks: the mask of each layer.
    options: ``model`` is the whole model; ``speed``, ``ranks_per_node`` and ``memory_bytes`` are
        those of plan ranks, that is, of the ranks with one tensor-parallel index.
    micro_batches: micro-batches in a step.
    ping_pong: whether a micro-batch is split into two halves.
    stage_sizes: the number of layers of each pipeline stage; an even split by default.
    first_trained_part: the first part of the model with a trained parameter (``pipeline.stages``).
    """

    parallel: MeshShape
    masks: tuple[Mask, ...]
    options: PlanOptions
    policy: Policy = POLICIES["distca"]
    micro_batches: int = 1
    ping_pong: bool = False
    stage_sizes: tuple[int, ...] = ()
    first_trained_part: int = 0

    def __post_init__(self) -> None:
        assert self.stages  # raises ValueError for stage sizes that do not fit
        if len(self.speed) != self.parallel.num_plan_ranks:
            raise ValueError(
                f"{len(self.speed)} speeds for {self.parallel.num_plan_ranks} plan ranks: give one"
                " for each, or none"
            )
        if self.parallel.pp > 1 and self.policy.scheduler == "all-gather":
            allowed = [name for name, policy in POLICIES.items() if not policy.places_tokens]
            raise ValueError(
                f"policy {self.policy.name} gathers keys within groups of workers of one stage, but"
                f" the stages of a pipeline share their attention: with pp = {self.parallel.pp}"
                f" choose one of {', '.join(allowed)}"
            )

    def for_evaluation(self) -> StepPlanner:
        """Returns a planner for the same mesh with one micro-batch of one half."""
        return replace(self, micro_batches=1, ping_pong=False)

    def with_servers(self, servers: int, speed: Sequence[float] | None) -> StepPlanner:
        """Returns a planner for another number of servers, with the speed of each plan rank.

        servers: as in ``MeshShape``, those of all tensor-parallel indices.
        """
        known = None if speed is None else tuple(float(one) for one in speed)
        options = replace(self.options, speed=known, cost=self.cost)
        return replace(self, parallel=replace(self.parallel, servers=servers), options=options)

    def with_speed(self, speed: tuple[float, ...]) -> StepPlanner:
        """Returns a planner with another relative speed of each plan rank."""
        return replace(self, options=replace(self.options, speed=speed, cost=self.cost))

    @cached_property
    def stages(self) -> tuple[Layers, ...]:
        """The layers [start, stop) of each stage."""
        return stage_layers(len(self.masks), self.parallel.pp, self.stage_sizes)

    @cached_property
    def speed(self) -> Floats:
        """The relative speed of each plan rank."""
        speed = self.options.speed
        return np.ones(self.parallel.num_plan_ranks) if speed is None else np.asarray(speed)

    @cached_property
    def cost(self) -> CostModel:
        """The cost model for the heads of one rank, read once."""
        return cost_model(self.options.cost, self.options.shape.share(self.parallel.tp))

    @cached_property
    def plan_options(self) -> PlanOptions:
        """Options of a single plan: for the heads and the servers of one tensor-parallel index."""
        shape = self.options.shape.share(self.parallel.tp)
        servers = self.parallel.servers // self.parallel.tp
        options = self.options.of_shape(shape)
        return replace(options, cost=self.cost, servers=servers)

    def plan(self, lengths: Ints, *, prefixes: Ints | None = None, train: bool = True) -> StepPlan:
        """Plans one batch of documents, forward and backward or (``train=False``) forward only.

        First all documents are placed, then the pools of all ticks are planned.

        prefixes: how many of a document's tokens are the first ones of the document before it
        """
        lengths = as_ints(lengths)
        known = np.zeros_like(lengths) if prefixes is None else as_ints(prefixes)
        micro_batches, placed = self._place(lengths, known)
        make_schedule = Schedule.aligned if train else Schedule.forward_only
        schedule = make_schedule(self.parallel.pp, self.micro_batches)
        plan_pool = cache(partial(_plan_pool, self, placed))  # equal pools only once
        slots = partial(_slots, self, micro_batches, plan_pool)
        return StepPlan(
            schedule=schedule,
            micro_batches=micro_batches,
            slots=tuple(tuple(slots(tick)) for tick in schedule.ticks),
            stages=self.stages,
            first_trained_part=self.first_trained_part,
        )

    def _place(
        self, lengths: Ints, prefixes: Ints
    ) -> tuple[tuple[tuple[Half, ...], ...], PlacedHalves]:
        """Splits documents, and places them on the workers of a stage.

        Returns halves, [micro-batches, halves], and what the placer has scheduled of them.
        """
        num_halves = 1 + self.ping_pong
        into_halves = halves_then_groups if self.policy.places_tokens else groups_then_halves
        sets = into_halves(lengths, prefixes, self.parallel.dp, self.micro_batches, num_halves)
        place_half = cache(self._place_half)  # halves of equal documents only once
        halves, placed_halves = [], {}
        for members, group in sets:
            columns = lengths[members], prefixes[members], group
            placed, given = place_half(*(tuple(column.tolist()) for column in columns))
            halves.append(Half(members, placed.placement, given))
            placed_halves[placed.placement] = placed
        return tuple(zip(*[iter(halves)] * num_halves, strict=True)), placed_halves

    def _place_half(
        self, lengths: tuple[int, ...], prefixes: tuple[int, ...], group: tuple[int, ...]
    ) -> tuple[Placed, Placement]:
        """Places documents such that the tokens of every worker are a multiple of tp.

        Returns their placement, and the given one, as in ``Half``.
        """
        p = self.parallel
        given = pack_in_groups(
            as_ints(lengths),
            p.dp,
            p.cp,
            multiple=p.tp,
            prefixes=as_ints(prefixes),
            group=as_ints(group),
        )
        if not self.policy.places_tokens:
            return Placed(given), given
        placed = place_to_plan(given, self._place_options, self.policy.placer)
        padded = pad_to_multiple(placed.placement, p.tp)
        if padded is placed.placement:
            return placed, given
        # A plan compares placements of the same documents: new fillers are not in ``given``.
        return Placed(padded), padded

    @cached_property
    def _place_options(self) -> PlanOptions:
        """Options of the placer, which places documents on the workers of one stage.

        All stages have the same placement. A worker therefore counts with its mean speed over
        stages, and the mask is the widest of all layers.
        """
        p = self.parallel
        widest = max(self.masks, key=lambda mask: abs(mask.reach))
        workers, servers = np.split(self.speed, [p.pp * p.workers_per_stage])
        speed = np.append(workers.reshape(p.pp, p.workers_per_stage).mean(axis=0), servers)
        return replace(self.plan_options, mask=widest, speed=speed)

    def layer(self, stage: int, slot: int, phase: Phase) -> int | None:
        """Returns the layer whose attention a stage brings to a slot; None if it has none left."""
        start, stop = self.stages[stage]
        if phase == FORWARD:
            return start + slot if start + slot < stop else None
        backward = backward_layers((start, stop), self.first_trained_part)
        return stop - 1 - slot if slot < backward else None


def _slots(
    planner: StepPlanner, micro_batches: Sequence[Sequence[Half]], plan_pool: PlanPool, tick: Tick
) -> Iterator[Slot]:
    """Yields the plans of each attention slot of a tick, one plan for each half.

    A tick ends with the first slot to which no stage brings a layer.
    """
    # Without a pipeline the pool is the same in both directions and needs one plan.
    planned = tick if planner.parallel.pp > 1 else replace(tick, phase=FORWARD)
    for slot in count():
        masks = _slot_masks(planner, tick, slot)
        if not any(masks):
            return
        yield tuple(
            plan_pool(planned, _stage_placements(micro_batches, tick, half, masks), masks)
            for half in range(1 + planner.ping_pong)
        )


def _stage_placements(
    micro_batches: Sequence[Sequence[Half]], tick: Tick, half: int, masks: StageMasks
) -> StagePlacements:
    """[stages] Returns how the documents of one half are placed in a tick."""
    halves = [
        micro_batches[micro_batch][half] if micro_batch is not None and mask is not None else None
        for micro_batch, mask in zip(tick.micro_batches, masks, strict=True)
    ]
    return tuple(None if one is None else (one.placement, one.given) for one in halves)


def _slot_masks(planner: StepPlanner, tick: Tick, slot: int) -> StageMasks:
    """[stages] Returns the mask of the layer that each stage brings to a slot; None if it has none.

    A stage without a micro-batch has no layer in the whole tick.
    """
    layers = [
        None if micro_batch is None else planner.layer(stage, slot, tick.phase)
        for stage, micro_batch in enumerate(tick.micro_batches)
    ]
    return tuple(None if layer is None else planner.masks[layer] for layer in layers)


def _plan_pool(
    planner: StepPlanner,
    placed_halves: PlacedHalves,
    tick: Tick,
    placements: StagePlacements,
    masks: StageMasks,
) -> Plan:
    """Plans the attention of one half of all stages in a tick, whose layers have ``masks``.

    A stage without a mask has no documents in the pool, and its workers only serve.
    """
    workers = planner.parallel.workers_per_stage
    placed = [stage and stage[0] for stage in placements]
    given = None
    if planner.policy.places_tokens:
        given = pool_placements([stage and stage[1] for stage in placements], workers)
    cost = planner.cost
    if planner.parallel.pp > 1:
        cost = cost.one_way(backward=tick.phase == BACKWARD)
    # Without a pipeline, the pool is placed like the half, and what was scheduled of it is used.
    known = placed_halves[next(one for one in placed if one is not None)]
    return plan(
        replace(known, placement=pool_placements(placed, workers)),
        planner.plan_options,
        scheduler=planner.policy.scheduler,
        given=given,
        mask=pool_masks(placed, masks),
        cost=cost,
        workers_serve=True,  # those that do not have speed 0
        speed=planner.speed * _serves(planner, tick),
        busy_s=_linear_s(planner, tick, placed),
    )


def _serves(planner: StepPlanner, tick: Tick) -> Bools:
    """[plan ranks] Returns which ranks serve in a tick.

    Dedicated servers always do. If there are any, workers serve only while their stage has no
    micro-batch.
    """
    servers = planner.plan_options.servers
    idle = [micro_batch is None or servers == 0 for micro_batch in tick.micro_batches]
    workers = np.repeat(idle, planner.parallel.workers_per_stage)
    return np.append(workers, np.ones(servers, bool))


def _linear_s(planner: StepPlanner, tick: Tick, placed: Sequence[Placement | None]) -> Floats:
    """[plan ranks] Returns the seconds of linear layers that keep a rank busy during a slot.

    They count only with ping-pong, where the workers of an idle stage can compute the attention
    of one half while the other workers run the linear layers of the other half. With one half,
    no attention starts before the linear layers are done.
    """
    parallel = planner.parallel
    seconds = np.zeros(parallel.num_plan_ranks)
    if not planner.ping_pong or parallel.pp == 1:
        return seconds
    none = np.zeros(parallel.workers_per_stage, np.int64)
    tokens: Ints = np.concatenate([none if p is None else p.tokens for p in placed])
    flops = planner.options.shape.linear_flops_per_token / parallel.tp
    flops *= 1 if tick.phase == FORWARD else 2
    seconds[: len(tokens)] = tokens * (flops / (planner.cost.linear_tflops * 1e12))
    return seconds
