"""Simulates a training step of one strategy: its time, bytes and memory."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import NamedTuple

import numpy as np

from distca.pipeline.memory import Memory, estimate
from distca.pipeline.schedule import FORWARD
from distca.pipeline.step_plan import StepPlan
from distca.pipeline.step_planner import StepPlanner
from distca.planning.masks import Mask, document_pairs
from distca.planning.options import PlanOptions
from distca.planning.policies import policy_of
from distca.planning.spans import Floats, as_ints
from distca.planning.traffic import memory_bytes
from distca.sim.cluster import Link
from distca.sim.packed_step import PackedStep, events
from distca.sim.packing import PackedPlan, pack
from distca.sim.rates import Rates
from distca.sim.scenario import Batch, Scenario, Strategy
from distca.sim.streams import Event, Streams
from distca.sim.ticks import micro_batch_tokens, run_ticks

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
    def busiest(self) -> float:
        """The time that the busiest rank computes over the mean of all ranks."""
        return float(self.busy_s.max() / self.busy_s.mean())

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
    lengths = as_ints(np.concatenate(batch))
    began = time.perf_counter()
    if planned is None:
        planned = _plan(scenario, strategy, rates, batch)
    plan_s = time.perf_counter() - began
    assert isinstance(planned, StepPlan if strategy.disaggregated else PackedPlan)
    without_links = replace(rates, cluster=replace(rates.cluster, across=NO_COST_LINK))
    timed = _run(rates, planned, record, seed)
    # Only the pairs inside the mask count.
    pairs = scenario.model.layers * document_pairs(lengths, scenario.mask)
    return Outcome(
        step_s=timed.step_s,
        free_s=_run(without_links, planned, False, seed).step_s,
        busy_s=timed.busy_s,
        num_bytes=timed.num_bytes * strategy.parallel.tp,
        tokens=int(lengths.sum()),
        flops=scenario.model.step_flops(float(lengths.sum()), float(pairs)),
        memory=_memory(rates, planned),
        plan_s=plan_s,
        planned=planned,
        events=timed.events,
    )


@dataclass(frozen=True)
class Summary:
    """Means over batches, and the largest memory of all batches."""

    strategy: Strategy
    step_s: float
    batch_step_s: tuple[float, ...]  # of each batch
    tokens_per_s: float
    tflops_per_gpu: float
    idle: float
    busiest: float
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
            busiest=fmean(o.busiest for o in outcomes),
            exposed=1 - sum(o.free_s for o in outcomes) / sum(o.step_s for o in outcomes),
            bytes_per_gpu=fmean(o.num_bytes for o in outcomes) / gpus,
            memory=memory,
            fits=memory.total <= scenario.cluster.usable_bytes,
            plan_s=fmean(o.plan_s for o in outcomes),
        )


def _plan(scenario: Scenario, strategy: Strategy, rates: Rates, batch: Batch) -> Planned:
    if not strategy.disaggregated:
        return pack(
            rates,
            batch,
            strategy.policy,
            strategy.micro_batches,
            mask=scenario.mask,
            tolerance=strategy.tolerance,
        )
    p, cluster = strategy.parallel, scenario.cluster
    # The greedy scheduler does not take speeds into account.
    knows_speeds = cluster.slow and cluster.known and strategy.policy == "distca"
    options = PlanOptions(
        model=scenario.model,
        cost=rates.cost,
        tolerance=strategy.tolerance,
        speed=cluster.speed(p.num_plan_ranks, p.tp) if knows_speeds else None,
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
    return planner.plan(as_ints(np.concatenate(batch)))


class _Timed(NamedTuple):
    step_s: float
    busy_s: Floats  # [ranks]
    num_bytes: int  # sent by the ranks with one tensor-parallel index
    events: tuple[Event, ...]


def _run(rates: Rates, planned: Planned, record: bool, seed: int) -> _Timed:
    p, cluster = rates.parallel, rates.cluster
    if isinstance(planned, PackedPlan):
        step = PackedStep(rates, planned, seed=seed)
        timeline = step.run()
        step_s = float(timeline.end.max()) + step.weights_and_optimizer_s(timeline)
        busy_s = step.busy.reshape(-1) + step.optimizer_s
        found = tuple(events(timeline, planned.width)) if record else ()
        return _Timed(step_s, busy_s, step.num_bytes, found)
    speed = cluster.speed(p.num_plan_ranks, p.tp)
    streams = Streams.on(cluster, speed, record=record, seed=seed)
    run_ticks(rates, planned, streams)
    found = tuple(streams.events or ())
    return _Timed(float(streams.compute.max()), streams.busy, streams.num_bytes, found)


def _memory(rates: Rates, planned: Planned) -> Memory:
    """Returns the memory of the worker that needs most, which is one of the first stage.

    No other stage has more layers or holds more micro-batches. Dedicated servers have no weights
    and activations, and need less.
    """
    p, layers = rates.parallel, -(-rates.shape.layers // rates.parallel.pp)
    if isinstance(planned, PackedPlan):
        p = replace(p, keep_weights=True)
        tokens, held = planned.largest_tokens, min(p.pp, len(planned.order))
        kv_bytes, width = planned.plan.shape.kv_memory_bytes, planned.width
        if planned.group_size is None:
            gathered_keys = int(planned.tokens.max()) * (width - 1) // width
            received = gathered_keys * kv_bytes * layers * held
        else:  # a ring holds the keys of one neighbour and receives those of the next
            received = 2 * tokens * kv_bytes
    else:
        of_micro_batch = (micro_batch_tokens(planned, m) for m in range(len(planned.micro_batches)))
        tokens, held = max(int(one.max()) for one in of_micro_batch), planned.schedule.in_flight[0]
        received = _received_bytes(planned)
    size = estimate(
        rates.shape, p, tokens, recompute=rates.recompute, layers=layers, in_flight=held
    )
    return replace(size, exchange=received)


def _received_bytes(step: StepPlan) -> int:
    """Returns the most bytes that the exchanges of one slot bring to a worker."""
    ticks = zip(step.schedule.ticks, step.slots, strict=True)
    distinct = {(tick.phase, slot) for tick, slots in ticks for slot in slots}
    most = 0
    for phase, slot in distinct:
        received = np.zeros(slot[0].placement.num_workers, np.int64)
        for plan in slot:
            tasks = plan.forward if phase == FORWARD else plan.backward
            used = memory_bytes(tasks, plan.placement, plan.shape, plan.devices.num_ranks)
            own = plan.placement.tokens * plan.shape.token_bytes
            received += used[: len(own)] - own
        most = max(most, int(received.max()))
    return most
