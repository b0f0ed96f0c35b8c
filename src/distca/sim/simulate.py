"""Simulates a training step of one strategy: its time, bytes and memory."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from distca.pipeline.memory import Memory, estimate
from distca.pipeline.schedule import FORWARD
from distca.pipeline.stages import stage_layers
from distca.pipeline.step_plan import StepPlan
from distca.pipeline.step_planner import StepPlanner
from distca.planning.masks import Mask, document_pairs
from distca.planning.options import PlanOptions
from distca.planning.plan import Plan
from distca.planning.policies import policy_of
from distca.planning.spans import Floats, Ints, as_ints
from distca.planning.traffic import memory_bytes
from distca.sim.cluster import Cluster, Link
from distca.sim.one_f_one_b import in_flight
from distca.sim.packed import PackedPlan, PackedStep, events, pack
from distca.sim.rates import Rates
from distca.sim.scenario import Batch, Scenario, Strategy
from distca.sim.streams import Event, Streams
from distca.sim.ticks import micro_batch_tokens, run_ticks, stage_elements

NO_COST_LINK = Link(1e30)
Planned = StepPlan | PackedPlan


@dataclass(frozen=True, eq=False)
class Outcome:
    """The result of one simulated step."""

    step_s: float
    free_s: float  # of the same step if communication between nodes took no time
    busy_s: Floats  # [ranks] seconds of computing
    num_bytes: int  # sent by all GPUs, including weights and gradients
    tokens: int
    flops: float  # of the model, without recomputation
    memory: Memory  # of the worker that needs most
    plan_s: float
    planned: Planned
    events: tuple[Event, ...] = ()

    @property
    def idle(self) -> float:
        """The fraction of all ranks' time in which they compute nothing."""
        return 1.0 - float(self.busy_s.mean()) / self.step_s

    @property
    def exposed(self) -> float:
        """The fraction of the step that infinitely fast links between nodes would save."""
        return 1.0 - self.free_s / self.step_s


def simulate(
    scenario: Scenario,
    strategy: Strategy,
    batch: Batch,
    *,
    planned: Planned | None = None,
    record: bool = False,
    seed: int = 0,
) -> Outcome:
    """Simulates one step.

    planned: plans of the same strategy and batch, made for other links or another keep_weights.
    record: keeps the events of every rank, for a timeline.
    """
    scenario.cluster.check(strategy.parallel)
    rates = Rates(scenario.model, scenario.cluster, strategy.parallel, scenario.recompute)
    if strategy.disaggregated:
        assert not isinstance(planned, PackedPlan)
        return _disaggregated(scenario, strategy, rates, batch, planned, record, seed)
    assert not isinstance(planned, StepPlan)
    return _packed(scenario, strategy, rates, batch, planned, record, seed)


@dataclass(frozen=True)
class Summary:
    """Means over batches, and the largest memory of all batches."""

    strategy: Strategy
    step_s: float
    batch_step_s: tuple[float, ...]  # of each batch
    tokens_per_s: float
    tflops_per_gpu: float
    idle: float
    exposed: float
    bytes_per_gpu: float
    memory: Memory
    fits: bool  # into the memory of the cluster's GPUs
    plan_s: float

    @classmethod
    def of(cls, scenario: Scenario, strategy: Strategy, batches: Iterable[Batch]) -> Summary:
        """Simulates a strategy on some batches."""
        outcomes = [simulate(scenario, strategy, batch, seed=n) for n, batch in enumerate(batches)]
        return cls.mean(scenario, strategy, outcomes)

    @classmethod
    def mean(cls, scenario: Scenario, strategy: Strategy, outcomes: Sequence[Outcome]) -> Summary:
        """Summarizes the simulated steps of a strategy."""
        gpus, step_s = scenario.cluster.gpus, fmean(o.step_s for o in outcomes)
        memory = max((o.memory for o in outcomes), key=lambda memory: memory.total)
        return cls(
            strategy=strategy,
            step_s=step_s,
            batch_step_s=tuple(o.step_s for o in outcomes),
            tokens_per_s=fmean(o.tokens for o in outcomes) / step_s,
            tflops_per_gpu=fmean(o.flops for o in outcomes) / step_s / gpus / 1e12,
            idle=sum(o.idle * o.step_s for o in outcomes) / sum(o.step_s for o in outcomes),
            exposed=1 - sum(o.free_s for o in outcomes) / sum(o.step_s for o in outcomes),
            bytes_per_gpu=fmean(o.num_bytes for o in outcomes) / gpus,
            memory=memory,
            fits=memory.total <= scenario.cluster.usable_bytes,
            plan_s=fmean(o.plan_s for o in outcomes),
        )


def _disaggregated(
    scenario: Scenario,
    strategy: Strategy,
    rates: Rates,
    batch: Batch,
    planned: StepPlan | None,
    record: bool,
    seed: int,
) -> Outcome:
    p, cluster, lengths = strategy.parallel, scenario.cluster, as_ints(np.concatenate(batch))
    speed = cluster.speed(p.num_plan_ranks, p.tp)
    # The greedy scheduler does not take speeds into account.
    knows_speeds = cluster.slow and cluster.known and strategy.policy == "distca"
    options = PlanOptions(
        model=scenario.model,
        cost=rates.cost,
        tolerance=strategy.tolerance,
        speed=speed if knows_speeds else None,
        ranks_per_node=cluster.ranks_per_node(p.tp),
        search_orders=1,
    )
    planner = StepPlanner(
        parallel=p,
        masks=(Mask.parse(scenario.mask),) * scenario.model.layers,
        options=options,
        policy=policy_of(strategy.policy, strategy.placement),
        micro_batches=strategy.micro_batches,
        ping_pong=strategy.ping_pong,
    )
    began = time.perf_counter()
    step = planned or planner.plan(lengths)
    plan_s = time.perf_counter() - began

    def run(rates: Rates) -> Streams:
        streams = _streams(rates.cluster, speed, record, seed)
        run_ticks(rates, step, streams)
        return streams

    streams = run(rates)
    return Outcome(
        step_s=float(streams.compute.max()),
        free_s=float(run(_without_links(rates)).compute.max()),
        busy_s=streams.busy,
        num_bytes=streams.num_bytes * p.tp,
        tokens=int(lengths.sum()),
        flops=_flops(scenario, lengths),
        memory=_ticks_memory(rates, step),
        plan_s=plan_s,
        planned=step,
        events=tuple(streams.events or ()),
    )


def _packed(
    scenario: Scenario,
    strategy: Strategy,
    rates: Rates,
    batch: Batch,
    planned: PackedPlan | None,
    record: bool,
    seed: int,
) -> Outcome:
    p, lengths = strategy.parallel, as_ints(np.concatenate(batch))
    began = time.perf_counter()
    packed = planned or pack(
        rates, batch, strategy.policy, strategy.micro_batches, mask=scenario.mask
    )
    plan_s = time.perf_counter() - began

    def run(rates: Rates) -> tuple[PackedStep, float]:
        step = PackedStep(rates, packed, seed=seed)
        timeline = step.run()
        return step, float(timeline.end.max()) + step.weights_and_optimizer_s(timeline)

    step, step_s = run(rates)
    return Outcome(
        step_s=step_s,
        free_s=run(_without_links(rates))[1],
        busy_s=step.busy.reshape(-1) + step.optimizer_s,
        num_bytes=step.num_bytes * p.tp,
        tokens=int(lengths.sum()),
        flops=_flops(scenario, lengths),
        memory=_packed_memory(rates, packed),
        plan_s=plan_s,
        planned=packed,
        events=tuple(events(PackedStep(rates, packed, seed=seed).run(), p.cp)) if record else (),
    )


def _streams(cluster: Cluster, speed: Floats, record: bool, seed: int) -> Streams:
    jitter, link_jitter = cluster.jitter, cluster.link_jitter
    return Streams(speed, jitter=jitter, link_jitter=link_jitter, record=record, seed=seed)


def _without_links(rates: Rates) -> Rates:
    """Returns rates with which communication between nodes takes no time."""
    return replace(rates, cluster=replace(rates.cluster, across=NO_COST_LINK))


def _flops(scenario: Scenario, lengths: Ints) -> float:
    """Returns FLOPs of forward and backward, counting only the pairs inside the mask."""
    pairs = scenario.model.layers * document_pairs(lengths, scenario.mask)
    return scenario.model.step_flops(float(lengths.sum()), float(pairs))


def _ticks_memory(rates: Rates, step: StepPlan) -> Memory:
    """Returns the memory of the worker that needs most.

    It includes the most that a slot's exchanges bring to a worker. Dedicated servers have no
    weights and activations, and need less.
    """
    p = rates.parallel
    tokens = max(int(micro_batch_tokens(step, m).max()) for m in range(len(step.micro_batches)))
    received, known, workers = 0, set(), p.pp * p.workers_per_stage
    for tick, slots in zip(step.schedule.ticks, step.slots, strict=True):
        for slot in slots:
            if (key := (tick.phase, *map(id, slot))) in known:
                continue
            known.add(key)
            both = [_received(rates, plan, tick.phase == FORWARD) for plan in slot]
            received = max(received, int(np.sum(both, axis=0)[:workers].max()))
    stages = zip(step.stages, step.schedule.in_flight, strict=True)
    sizes = [
        estimate(rates.shape, p, tokens, recompute=rates.recompute, layers=stop - start,
                 in_flight=count)
        for (start, stop), count in stages
    ]  # fmt: skip
    largest = max(sizes, key=lambda memory: memory.total)
    return replace(largest, exchange=received)


def _received(rates: Rates, plan: Plan, forward: bool) -> Ints:
    """Returns the bytes that each rank receives in one layer."""
    tasks = plan.forward if forward else plan.backward
    used = memory_bytes(tasks, plan.placement, plan.shape, rates.num_ranks)
    own = np.zeros(rates.num_ranks, np.int64)
    weight = 2 * plan.shape.q_bytes + plan.shape.kv_bytes
    own[: plan.placement.num_workers] = plan.placement.tokens * weight
    return used - own


def _packed_memory(rates: Rates, packed: PackedPlan) -> Memory:
    """Returns the memory of the worker that needs most, with gathered weights, keys and values."""
    p, micro_batches = rates.parallel, len(packed.order)
    tokens = int(packed.plan.placement.tokens.max())
    sizes = []
    for stage, (start, stop) in enumerate(stage_layers(rates.shape.layers, p.pp)):
        held = in_flight(stage, p.pp, micro_batches)
        size = estimate(rates.shape, p, tokens, recompute=rates.recompute, layers=stop - start,
                        in_flight=held)  # fmt: skip
        others = int(packed.tokens.max()) * (p.cp - 1) // p.cp
        gathered_keys = others * packed.plan.shape.kv_bytes * (stop - start) * held
        weights = stage_elements(rates) * (2 + 4) // p.tp
        sizes.append(replace(size, gathered=weights, exchange=gathered_keys))
    return max(sizes, key=lambda memory: memory.total)
