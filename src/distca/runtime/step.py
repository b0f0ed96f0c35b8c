"""One step on this rank, tick by tick: its own micro-batches, and the attention of all stages.

In every tick all stages go the same way. A stage with a micro-batch takes it through its layers; in
each layer's slot all ranks exchange and attend, whoever has no layer left, no micro-batch or no
model only with what others sent. How many slots a tick has is written in the plan, so no rank
depends on what another one's autograd happens to visit.

Inside a tick, with two halves:

    seam 0     part(ping) dispatch(ping)  part(pong) dispatch(pong)
    slot 0     compute(ping)  compute(pong)
    seam 1     combine(ping) part(ping) dispatch(ping)  combine(pong) part(pong) dispatch(pong)
    ...

Every exchange but the first and the last is hidden by the other half's compute: what
``dispatch(ping)`` sends travels during part(pong), what ``dispatch(pong)`` sends during
compute(ping), and results come home during compute(pong) and during the next part(ping). Backward
is the same in reverse, since autograd runs the newest node first.

A seam is called once for both halves, so its parameters are gathered once. ``part`` may be
checkpointed; ``combine`` and ``dispatch`` stand outside of it, or they would exchange twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.profiler import record_function
from torch.utils.checkpoint import checkpoint

from distca.attention.agreement import Handshake, agree
from distca.attention.core import CoreAttention
from distca.attention.overlap import AsyncAttention
from distca.attention.passes import serve_backward, serve_forward
from distca.attention.prepared import PreparedPlan, TensorSpec
from distca.model.llama import Arriving, Leaving, Llama, Part, Seam
from distca.model.loss import Loss
from distca.pipeline.schedule import BACKWARD, FORWARD, Phase, Tick
from distca.pipeline.step_plan import Slot
from distca.planning.plan import Plan
from distca.runtime.batches import Step
from distca.runtime.mesh import RankContext
from distca.runtime.p2p import StageP2P
from distca.runtime.parallelize import add_tied, last_backward, reshard

Observe = Callable[[int, Tick], None]


@dataclass(frozen=True, eq=False)
class StepRunner:
    """What it takes to bring micro-batches through the layers on this rank."""

    context: RankContext
    attentions: tuple[CoreAttention, ...]  # one for each half: their exchanges overlap
    recompute: bool = False  # checkpoint the parts of seams
    dtype: torch.dtype = torch.float32  # of what travels
    observe: Observe | None = None  # called after each tick

    @classmethod
    def of(
        cls,
        context: RankContext,
        *,
        halves: int = 1,
        recompute: bool = False,
        backend: str = "auto",
        deterministic: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> StepRunner:
        attentions = (
            CoreAttention(
                context.attention,
                control=context.control,
                backend=backend,
                deterministic=deterministic,
            )
            for _ in range(halves)
        )
        return cls(context, tuple(attentions), recompute, dtype)

    def train(self, model: Llama | None, step: Step) -> Tensor:
        """Gradients of all micro-batches; this rank's part of the mean loss over all targets.

        ``model``: this rank's stage, or None where it only serves.
        """
        run = _Run(self, model, step)
        run()
        total = torch.zeros((), device=self.context.device)
        for losses in run.losses.values():
            total += run.mean(losses).detach()
        if model is not None:
            reshard(model, self.context)
            add_tied(model, self.context)
        return total

    @torch.no_grad()
    def losses(self, model: Llama | None, step: Step) -> dict[int, list[Loss]]:
        """Of each micro-batch and half, without gradients; nothing but on the last stage."""
        run = _Run(self, model, step)
        run()
        if model is not None:
            reshard(model, self.context)
        return run.losses

    def own(self, rows: Tensor) -> Tensor:
        """This rank's share of a worker's rows: tensor parallelism splits them at the loss."""
        mesh = self.context.tp_mesh
        return rows if mesh is None else rows.chunk(mesh.size())[mesh.get_local_rank()]


@dataclass(frozen=True, eq=False)
class _Held:
    """What the backward of a micro-batch starts from, and where its gradient leaves."""

    arriving: list[Arriving]
    leaving: list[Leaving]


class _Run:
    """One step under way."""

    def __init__(self, runner: StepRunner, model: Llama | None, step: Step) -> None:
        self.runner, self.model, self.step, self.plan = runner, model, step, step.plan
        self.losses: dict[int, list[Loss]] = {}  # by micro-batch, on the last stage
        self._stage = runner.context.stage
        self._held: dict[int, _Held] = {}
        self._neighbours = StageP2P(runner.context, runner.dtype)
        self._ways: dict[tuple[Phase, int, Plan], PreparedPlan] = {}
        self._agree()

    def __call__(self) -> None:
        for number, tick in enumerate(self.plan.schedule.ticks):
            mine = None if self._stage is None else tick.micro_batches[self._stage]
            title = "serves" if self._stage is None else tick.cell(self._stage)
            with record_function(f"tick {number} {tick.phase}: {title}"):
                go = self._forward if tick.phase == FORWARD else self._backward
                done = 0 if mine is None else go(mine)
                for slot in self.plan.slots[number][done:]:
                    self._serve(tick.phase, slot)
            if self.runner.observe is not None:
                self.runner.observe(number, tick)
        self._neighbours.finish()

    def mean(self, losses: Sequence[Loss]) -> Tensor:
        """One number for both halves, so that they take turns in backward too."""
        targets = max(self.step.batch.num_targets, 1)  # a batch of prompts alone has none
        return torch.stack([loss.total for loss in losses]).sum() / targets

    def layer(self, micro_batch: int, layer: int, half: int) -> PreparedPlan:
        """Of this stage, there and back; one with nothing to learn from below does not go back."""
        assert self.model is not None
        assert self._stage is not None
        plan = self._slots(FORWARD, micro_batch)[layer - self.model.start][half]
        there, number = self._way(FORWARD, half, plan), self.model.stop - 1 - layer
        if not self.plan.schedule.has_backward or number >= self.plan.backward_slots[self._stage]:
            return there
        plan = self._slots(BACKWARD, micro_batch)[number][half]
        return replace(there, backward=self._way(BACKWARD, half, plan).backward)

    def _slots(self, phase: Phase, micro_batch: int) -> Sequence[Slot]:
        """Of the tick in which a micro-batch goes through this stage."""
        assert self._stage is not None
        for tick, slots in zip(self.plan.schedule.ticks, self.plan.slots, strict=True):
            if (tick.phase, tick.micro_batches[self._stage]) == (phase, micro_batch):
                return slots
        raise AssertionError(f"no tick takes {phase}{micro_batch} through stage {self._stage}")

    def _agree(self) -> None:
        """With all ranks, once a step: on all plans, and that everybody can run them."""
        error = ""
        try:
            for tick, slots in zip(self.plan.schedule.ticks, self.plan.slots, strict=True):
                for slot in slots:
                    for half, plan in enumerate(slot):
                        self._way(tick.phase, half, plan)
        except ValueError as refused:
            error = str(refused)
        mine = Handshake(
            plan=self.plan.fingerprint,
            dtype=str(self.runner.dtype).removeprefix("torch."),
            grad_mode=torch.is_grad_enabled(),
            error=error,
        )
        agree(self.runner.attentions[0].transport, mine)

    def _way(self, phase: Phase, half: int, plan: Plan) -> PreparedPlan:
        """This rank's part of a plan in one direction."""
        key = (phase, half, plan)
        if key not in self._ways:
            shape, dtype, context = plan.shape, self.runner.dtype, self.runner.context
            spec = TensorSpec(shape.heads, shape.kv_heads, shape.head_dim, dtype, context.device)
            direction = "forward" if phase == FORWARD else "backward"
            self._ways[key] = self.runner.attentions[half].prepare(spec, **{direction: plan})
        return self._ways[key]

    def _serve(self, phase: Phase, slot: Slot) -> None:
        halves = [self._way(phase, half, plan) for half, plan in enumerate(slot)]
        (serve_forward if phase == FORWARD else serve_backward)(halves)

    def _forward(self, micro_batch: int) -> int:
        """Through this stage's layers; how many slots of the tick that took."""
        assert self.model is not None
        arriving = self._arriving(micro_batch)
        leaving = self.model(arriving, _Walk(self, micro_batch))
        if leaving[0].loss is not None:
            self.losses[micro_batch] = [half.loss for half in leaving if half.loss is not None]
        else:
            self._neighbours.send_on([half.x for half in leaving])
        if self.plan.schedule.has_backward:
            self._held[micro_batch] = _Held(arriving, leaving)
        return self.model.stop - self.model.start

    def _arriving(self, micro_batch: int) -> list[Arriving]:
        assert self.model is not None
        context, device = self.runner.context, self.runner.context.device
        arriving = []
        for half in self.plan.micro_batches[micro_batch]:
            rows = self.step.rows(half, context.worker)
            tokens, positions = (t.to(device, non_blocking=True) for t in rows[:2])
            labels = self.runner.own(rows.labels).to(device, non_blocking=True)
            arriving.append(Arriving(tokens, positions, labels=labels))
        if self._stage:
            sizes = [len(half.x) // context.parallel.tp for half in arriving]
            found = self._neighbours.take_on(sizes, self.model.config.hidden)
            learns = self.plan.schedule.has_backward and self.plan.gradient_enters(self._stage)
            arriving = [
                half._replace(x=x.requires_grad_(learns))
                for half, x in zip(arriving, found, strict=True)
            ]
        return arriving

    def _backward(self, micro_batch: int) -> int:
        assert self.model is not None
        assert self._stage is not None
        held, stage = self._held.pop(micro_batch), self._stage
        last = micro_batch + 1 == self.plan.schedule.num_micro_batches
        last_backward(self.model, self.runner.context, last)
        if micro_batch in self.losses:
            ends, grads = [self.mean(self.losses[micro_batch])], None
        else:
            ends, grads = [half.x for half in held.leaving], None
            if self.plan.gradient_enters(stage + 1):
                grads = self._neighbours.take_back(ends)
        if any(end.requires_grad for end in ends):
            torch.autograd.backward(ends, grads)
        if self.plan.gradient_enters(stage):
            self._neighbours.send_back([_grad(half.x) for half in held.arriving])
        return self.plan.backward_slots[stage]


def _grad(x: Tensor) -> Tensor:
    return torch.zeros_like(x) if x.grad is None else x.grad


class _Walk:
    """One pass: calls every seam once, with all halves, and attends in between."""

    def __init__(self, run: _Run, micro_batch: int) -> None:
        self._run, self._micro_batch = run, micro_batch
        self._pending: dict[int, AsyncAttention] = {}

    def __call__(self, seams: Sequence[Seam], arriving: list[Arriving]) -> list[Leaving]:
        leaving: list[Leaving] = []
        for seam in seams:
            leaving = seam(arriving, partial(self._cross, seam.number))
            for pending in self._pending.values():
                pending.compute()
            arriving = [
                before._replace(x=after.x) for before, after in zip(arriving, leaving, strict=True)
            ]
        return leaving

    def _cross(self, layer: int, part: Part, number: int, arriving: Arriving) -> Leaving:
        """One half through one seam. What it returns holds q, k and v: FSDP waits for their
        gradients to gather the seam again."""
        if number in self._pending:
            arriving = arriving._replace(attended=self._pending.pop(number).combine())
        leaving = self._recomputed(part, arriving)
        if leaving.qkv is not None:
            plan = self._run.layer(self._micro_batch, layer, number)
            self._pending[number] = AsyncAttention(plan, *leaving.qkv)
        return leaving

    def _recomputed(self, part: Part, arriving: Arriving) -> Leaving:
        if not self._run.runner.recompute or not torch.is_grad_enabled():
            return part(arriving)
        leaving: Leaving = checkpoint(part, arriving, use_reentrant=False)
        return leaving
