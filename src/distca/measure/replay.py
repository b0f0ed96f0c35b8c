"""One rank of a large plan on one device: its real share of the work, true bytes on a slow link.

A replay takes a rank's tokens forward and backward through a few layers, as a training step does,
with an exchange that has no peers
(``distca.dispatch.transports.throttled``). What does not come from the plan
is kept out of the time: rows lie on the device already, and layouts are made in a warm-up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from types import SimpleNamespace
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from distca.attention.backends.base import Traits
from distca.attention.backends.choice import choose
from distca.attention.core import CoreAttention
from distca.attention.prepared import PreparedPlan, TensorSpec
from distca.data.documents import Batch
from distca.dispatch.meter import Meter
from distca.dispatch.transports.throttled import ThrottledTransport
from distca.model.config import ModelConfig
from distca.model.initialize import initialize
from distca.model.llama import Head, Leaving, Llama, on_meta
from distca.model.loss import Loss
from distca.pipeline.mesh import MeshShape
from distca.pipeline.step_plan import Half, StepPlan
from distca.planning.plan import Plan
from distca.planning.spans import expand
from distca.runtime.batches import Rows, Step
from distca.runtime.mesh import RankContext
from distca.runtime.parallelize import check
from distca.runtime.step import StepRunner

HEAD_START_CYCLES = 10_000_000  # some milliseconds


class Measured(NamedTuple):
    """Seconds of the device: the whole pass, and of it what waited for peers and what attended."""

    step_s: float
    exposed_s: float
    attention_s: float


class Replay:
    """Forward and backward of one rank; every call is one more round.

    model: any of one device, such as ``layers_of`` builds.
    dtype: of what travels.
    """

    def __init__(
        self,
        model: Llama,
        step: StepPlan,
        rank: int,
        *,
        bytes_per_s: float,
        latency_s: float = 0.0,
        dtype: torch.dtype,
        backend: str = "auto",
    ) -> None:
        halves = step.micro_batches[0]
        workers = halves[0].placement.num_workers
        if len(step.stages) > 1 or len(step.micro_batches) > 1:
            raise ValueError(
                f"a plan of {len(step.stages)} stages and {len(step.micro_batches)} micro-batches:"
                " a replay runs one of each"
            )
        if not 0 <= rank < workers:
            raise ValueError(f"rank {rank} of a plan for {workers} workers: choose one of them")
        device = next(model.parameters()).device
        # What a step asks of its place, without the groups of a world that is not there.
        place = SimpleNamespace(
            device=device, parallel=MeshShape(), stage=0, worker=rank, tp_mesh=None, ends=None
        )
        num_ranks = step.slots[0][0][0].devices.num_ranks
        transports = (ThrottledTransport(rank, num_ranks, bytes_per_s, latency_s) for _ in halves)
        attentions = tuple(_Prepared(transport, backend) for transport in transports)
        self.model = model
        self._device, self._meter = device, Meter()
        self._runner = StepRunner(cast(RankContext, place), attentions, recompute=True, dtype=dtype)
        rows = {half: _rows(half, rank, model.config.vocab_size, device) for half in halves}
        self._step = _Held(Batch(()), step, rows)

    def __call__(self) -> Measured:
        if self._device.type == "cuda":
            # The host gets ahead, as it is in the midst of training: devices do not wait for it.
            torch.cuda._sleep(HEAD_START_CYCLES)  # type: ignore[no-untyped-call]
        with self._meter.span("step", self._device):
            self._runner.train(self.model, self._step)
        self.model.zero_grad()
        taken = [attention.meter.take() for attention in self._runner.attentions]
        return Measured(
            self._meter.take()["step"],
            *(sum(one.get(name, 0.0) for one in taken) for name in ("exposed", "attention")),
        )


def measure(replay: Replay, rounds: int) -> Measured:
    """After a warm-up, in which kernels are compiled and memory is found."""
    if rounds < 1:
        raise ValueError(f"{rounds} rounds: measure 1 or more")
    replay()
    return typical([replay() for _ in range(rounds)])


def typical(rounds: Sequence[Measured]) -> Measured:
    """The median of each figure."""
    return Measured(*map(median, zip(*rounds, strict=True)))


# -- the model -----------------------------------------------------------------------------------


def share_of(config: ModelConfig, tp: int, layers: int) -> ModelConfig:
    """A few layers of what one of ``tp`` tensor-parallel ranks holds, as a model of its own.

    It takes all tokens of its group through its heads and its part of the widths. Norms and
    residuals are the whole model's, on all tokens, where sequence parallelism would split them.
    """
    check(config, tp)
    return replace(
        config,
        layers=layers,
        heads=config.heads // tp,
        kv_heads=config.kv_heads // tp,
        ffn=config.ffn // tp,
        vocab_size=-(-config.vocab_size // tp),
        tied=False,
    )


def layers_of(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Llama:
    """A model without an output head, whole on one device.

    The head is the same on every rank, and with the loss it takes longer than a few layers do.
    """
    model = on_meta(config)
    model.in_order[-1].head = _NoHead()
    model.to(dtype)
    initialize(model, seed=0, device=device)
    return model


def backend_of(config: ModelConfig, device: torch.device, dtype: torch.dtype, name: str) -> str:
    """The one that attends: as named, if it can, or the one that ``auto`` comes to."""
    q, k, _ = TensorSpec(config.heads, config.kv_heads, config.head_dim, dtype, device).empty()
    masks = {config.mask_of(layer) for layer in range(config.layers)}
    return choose(name, Traits.of(q, k, masks)).name


class _NoHead(Head):
    """Ends in one number, so that there is something to go backward from."""

    def __init__(self) -> None:
        nn.Module.__init__(self)

    def forward(self, x: Tensor, labels: Tensor | None) -> Leaving:
        total = torch.linalg.vector_norm(x)
        return Leaving(x, loss=Loss(total, total.detach()))


# -- what is made once ---------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Held(Step):
    """A step of which one rank's rows are there already; the other ranks' are never made."""

    held: Mapping[Half, Rows]

    def rows(self, half: Half, worker: int) -> Rows:
        return self.held[half]


def _rows(half: Half, rank: int, vocab_size: int, device: torch.device) -> Rows:
    """Random tokens at true positions."""
    placement = half.placement
    own = np.flatnonzero(placement.worker == rank)
    size = placement.stop[own] - placement.start[own]
    lengths = np.repeat(placement.lengths[placement.document[own]], size)
    tokens = torch.randint(vocab_size, (len(lengths),), device=device)
    positions = torch.from_numpy(expand(placement.start[own], size)).to(device)
    return Rows(tokens, positions, labels=tokens, lengths=torch.from_numpy(lengths).to(device))


class _Prepared(CoreAttention):
    """Makes its layouts once: in training, hosts make them while devices are still busy."""

    def __init__(self, transport: ThrottledTransport, backend: str) -> None:
        super().__init__(transport=transport, backend=backend)
        self._made: dict[tuple[TensorSpec, Plan | None, Plan | None], PreparedPlan] = {}

    def prepare(
        self, spec: TensorSpec, *, forward: Plan | None = None, backward: Plan | None = None
    ) -> PreparedPlan:
        key = (spec, forward, backward)
        if key not in self._made:
            self._made[key] = super().prepare(spec, forward=forward, backward=backward)
        return self._made[key]
