"""Runs one training step on this rank.

A **step** is a sequence of ticks, which all ranks go through together (``pipeline.schedule``).

In a **tick** every pipeline stage runs one micro-batch through its layers, all stages in the same
direction. A stage may have no micro-batch, and a dedicated server has no layers at all.

A tick has attention **slots**. In each of them all ranks exchange and compute attention together. A
rank first runs the slots of its own layers and then serves in the remaining ones. The plan says how
many slots a tick has, so no rank depends on which autograd nodes another rank executes.

``pipeline.tick_program`` defines the order of operations in a tick: ``Llama.forward`` follows it
in the slots of a rank's own layers, and ``_serve`` in the remaining ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distca.attention.core import CoreAttention
from distca.attention.overlap import SlotAttention
from distca.attention.passes import BackwardPass, ForwardPass
from distca.dispatch.agreement import Handshake, agree
from distca.dispatch.ranges import named, place
from distca.dispatch.transports.surviving import SurvivingTransport
from distca.model.llama import Arriving, Leaving, Llama
from distca.model.loss import Loss
from distca.pipeline.schedule import BACKWARD, FORWARD, Phase, Tick
from distca.pipeline.step_plan import StepPlan
from distca.pipeline.tick_program import TickProgram
from distca.runtime.batches import Step
from distca.runtime.mesh import RankContext
from distca.runtime.p2p import StageTransfer
from distca.runtime.parallelize import add_tied_gradients, reshard, set_last_backward
from distca.runtime.prepared import PreparedSlot, PreparedTicks, prepare_ticks
from distca.runtime.rank_device import shares_gpu
from distca.runtime.warm_up import warm_up_step

Observe = Callable[[int, Tick], None]


@dataclass(frozen=True, eq=False)
class StepRunner:
    """Runs the steps of a training run on this rank.

    attentions: one for each half, since their exchanges overlap.
    recompute: recomputes linear layers in the backward pass (activation checkpointing).
    dtype: that of activations and of q, k and v.
    observe: called after each tick with its number.
    """

    context: RankContext
    attentions: tuple[CoreAttention, ...]
    recompute: bool = False
    dtype: torch.dtype = torch.float32
    observe: Observe | None = None

    @classmethod
    def of(
        cls,
        context: RankContext,
        *,
        halves: int = 1,
        recompute: bool = False,
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> StepRunner:
        """Makes a runner with the attention of each half; ``halves`` is 2 with ping-pong.

        options: further ones of ``CoreAttention``, such as ``backend``.
        """
        attentions = tuple(_attention(context, options) for _ in range(halves))
        return cls(context, attentions, recompute, dtype)

    def train(
        self, model: Llama | None, step: Step, prepared: PreparedTicks | None = None
    ) -> Tensor:
        """Computes the gradients of a step; returns this rank's part of the mean loss per target.

        model: the stage of this rank; None on a dedicated server.
        prepared: the prepared plans of the step, if there are any yet (see ``prepare``).
        """
        self.warm_up(model, step.plan)
        run = _StepRun(self, model, step, prepared)
        run.run()
        total = torch.zeros((), device=self.context.device)
        for losses in run.losses.values():
            total += run.mean_loss(losses).detach()
        if model is not None:
            reshard(model, self.context)
            add_tied_gradients(model, self.context)
        return total

    @torch.no_grad()
    def losses(self, model: Llama | None, step: Step) -> dict[int, list[Loss]]:
        """Returns the loss of each half by micro-batch, without gradients.

        Only the ranks of the last stage have losses.
        """
        self.warm_up(model, step.plan)
        run = _StepRun(self, model, step)
        run.run()
        if model is not None:
            reshard(model, self.context)
        return run.losses

    def warm_up(self, model: Llama | None, plan: StepPlan) -> None:
        """Loads the kernels that a step may be the first to use, if ranks share the GPU.

        It comes before ranks compare their plans, so none has begun the step yet. To measure a step
        without it, call it before; a second time, there is nothing left to load.
        """
        if model is not None and shares_gpu():
            warm_up_step(model, plan, self.context, self.dtype, recompute=self.recompute)

    def prepare(self, plan: StepPlan) -> PreparedTicks:
        """Prepares the plans of a step; raises ValueError if this rank cannot run one of them."""
        context = self.context
        return prepare_ticks(plan, self.attentions, context.stage, self.dtype, context.device)

    def tp_share(self, rows: Tensor) -> Tensor:
        """Returns this rank's share of a worker's rows, which tensor parallelism splits."""
        mesh = self.context.tp_mesh
        return rows if mesh is None else rows.chunk(mesh.size())[mesh.get_local_rank()]


def _attention(context: RankContext, options: dict[str, Any]) -> CoreAttention:
    group, peers = context.attention_group, context.host.peers
    if peers is None:
        return CoreAttention(group, **options)
    return CoreAttention(transport=SurvivingTransport(group, peers, context.servers), **options)


class _InFlight(NamedTuple):
    """A micro-batch that waits for its backward: the inputs and outputs of the stage."""

    inputs: list[Arriving]
    outputs: list[Leaving]


class _StepRun:
    def __init__(
        self,
        runner: StepRunner,
        model: Llama | None,
        step: Step,
        prepared: PreparedTicks | None = None,
    ) -> None:
        self.losses: dict[int, list[Loss]] = {}  # by micro-batch, on the last stage
        self._runner, self._model, self._step, self._plan = runner, model, step, step.plan
        self._stage = runner.context.stage
        self._in_flight: dict[int, _InFlight] = {}
        self._transfer: StageTransfer | None = None  # of the last tick
        self._arrivals: dict[tuple[Phase, int], StageTransfer] = {}
        self._ticks = self._handshake(prepared)

    def run(self) -> None:
        for number, (tick, slots) in enumerate(
            zip(self._plan.schedule.ticks, self._ticks, strict=True)
        ):
            cell = "serves" if self._stage is None else tick.cell(self._stage)
            with named(f"tick {number} {tick.phase}: {cell}"), self._timed():
                self._pass_on(tick, self._run_tick(tick, slots))
            if self._runner.observe is not None:
                self._runner.observe(number, tick)
        if self._transfer is not None:
            self._transfer.wait()

    def _timed(self) -> AbstractContextManager[None]:
        """Measures a tick, and lets the meters of all halves begin another lap."""
        meters = [attention.meter for attention in self._runner.attentions]
        for meter in meters:
            meter.start_lap()
        return meters[0].time("tick", self._runner.context.device)

    def mean_loss(self, losses: Sequence[Loss]) -> Tensor:
        """Returns one scalar for all halves, from which their backwards run interleaved."""
        targets = max(self._step.batch.num_targets, 1)  # a batch may have prompts only
        return torch.stack([loss.total for loss in losses]).sum() / targets

    def _handshake(self, prepared: PreparedTicks | None) -> PreparedTicks:
        """Prepares all plans; checks once that every rank has the same ones and can run them."""
        error = ""
        if prepared is None:
            try:
                prepared = self._runner.prepare(self._plan)
            except ValueError as problem:
                error = str(problem)
        mine = Handshake(
            plan=self._plan.fingerprint,
            dtype=str(self._runner.dtype).removeprefix("torch."),
            grad_mode=torch.is_grad_enabled(),
            message="step",
            error=error,
        )
        agree(self._runner.attentions[0].transport, mine)
        assert prepared is not None  # otherwise there was an error
        return prepared

    def _run_tick(self, tick: Tick, slots: Sequence[PreparedSlot]) -> list[Tensor]:
        """Runs this stage's micro-batch, if it has one, and serves in the remaining slots.

        Returns the activations for the next stage, or the gradients for the previous one.
        """
        own, produced = 0, []
        if self._stage is not None and (m := tick.micro_batches[self._stage]) is not None:
            if tick.phase == FORWARD:
                start, stop = self._plan.stages[self._stage]
                own = stop - start
                produced = self._forward(m, slots)
            else:
                own = self._plan.backward_slots[self._stage]
                produced = self._backward(m)
        _serve(slots[own:], tick.phase)
        return produced

    def _pass_on(self, tick: Tick, produced: list[Tensor]) -> None:
        """Starts to send what a tick has produced, and to receive what a neighbor has."""
        if self._stage is None:
            return
        before, after = self._stage - 1, self._stage + 1
        source, target = (before, after) if tick.phase == FORWARD else (after, before)
        m = tick.micro_batches[source] if 0 <= source < len(tick.micro_batches) else None
        incoming = [] if m is None else self._empty(tick.phase, m, source)
        if self._transfer is not None:
            self._transfer.wait()
            self._transfer = None
        if not produced and not incoming:
            return
        self._transfer = StageTransfer(
            self._runner.context, produced, incoming, source=source, target=target
        )
        if m is not None and incoming:
            self._arrivals[tick.phase, m] = self._transfer

    def _empty(self, phase: Phase, micro_batch: int, source: int) -> list[Tensor]:
        """Allocates what the stage ``source`` sends: activations, gradients of them, or nothing."""
        if phase == BACKWARD:
            outputs = self._in_flight[micro_batch].outputs
            sent = outputs if self._plan.sends_gradient(source) else ()
            return [torch.empty_like(leaving.x) for leaving in sent]
        assert self._model is not None
        context, hidden = self._runner.context, self._model.config.hidden
        tokens = (
            int(half.placement.tokens[context.worker]) // context.parallel.tp
            for half in self._plan.micro_batches[micro_batch]
        )
        dtype, device = self._runner.dtype, context.device
        return [torch.empty(count, hidden, dtype=dtype, device=device) for count in tokens]

    def _forward(self, micro_batch: int, slots: Sequence[PreparedSlot]) -> list[Tensor]:
        assert self._model is not None
        attention = SlotAttention(slots, self._model.start)
        inputs = self._inputs(micro_batch)
        outputs = self._model(inputs, attention, recompute=self._runner.recompute)
        if self._plan.schedule.has_backward:
            self._in_flight[micro_batch] = _InFlight(inputs, outputs)
        if outputs[0].loss is None:
            return [leaving.x for leaving in outputs]
        self.losses[micro_batch] = [one.loss for one in outputs if one.loss is not None]
        return []

    def _inputs(self, micro_batch: int) -> list[Arriving]:
        """Returns the inputs of this stage: token ids, or activations of the previous stage."""
        assert self._model is not None
        context, device = self._runner.context, self._runner.context.device
        inputs = []
        for half in self._plan.micro_batches[micro_batch]:
            rows = self._step.rows(half, context.worker)
            tokens, positions = (t.to(device, non_blocking=True) for t in rows[:2])
            labels = self._runner.tp_share(rows.labels).to(device, non_blocking=True)
            inputs.append(Arriving(tokens, positions, labels=labels))
        if not self._stage:
            return inputs
        received = self._arrivals.pop((FORWARD, micro_batch)).wait()
        with_gradient = self._plan.schedule.has_backward and self._plan.sends_gradient(self._stage)
        return [
            arriving._replace(x=x.requires_grad_(with_gradient))
            for arriving, x in zip(inputs, received, strict=True)
        ]

    def _backward(self, micro_batch: int) -> list[Tensor]:
        assert self._model is not None
        assert self._stage is not None
        inputs, outputs = self._in_flight.pop(micro_batch)
        last = micro_batch + 1 == self._plan.schedule.num_micro_batches
        set_last_backward(self._model, self._runner.context, last)
        gradients = None
        if micro_batch in self.losses:
            roots = [self.mean_loss(self.losses[micro_batch])]
        else:
            roots = [leaving.x for leaving in outputs]
            if self._plan.sends_gradient(self._stage + 1):
                gradients = self._arrivals.pop((BACKWARD, micro_batch)).wait()
        if any(root.requires_grad for root in roots):
            torch.autograd.backward(roots, gradients)
        if not self._plan.sends_gradient(self._stage):
            return []
        return [_gradient(arriving.x) for arriving in inputs]


def _gradient(x: Tensor) -> Tensor:
    return torch.zeros_like(x) if x.grad is None else x.grad


def _serve(slots: Sequence[PreparedSlot], phase: Phase) -> None:
    """Takes part in attention slots without queries, keys and values of its own."""
    halves = len(slots[0]) if slots else 0
    dispatch = ForwardPass.without_rows if phase == FORWARD else BackwardPass.without_rows
    passes: dict[int, ForwardPass | BackwardPass] = {}
    for operation in TickProgram.of(len(slots), halves, phase).operations:
        half = operation.half
        match operation.kind:
            case "dispatch":
                assert operation.slot is not None
                where = place("slot", operation.slot, half, halves)
                passes[half] = dispatch(slots[operation.slot][half], where)
            case "compute":
                passes[half].compute()
            case "combine":
                passes.pop(half).combine()
