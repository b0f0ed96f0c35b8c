"""Replays one rank of a large plan on one device: its share of the work, with throttled exchanges.

A replay runs a rank's tokens forward and backward through a few layers, as a training step does,
with a transport that has no peers and takes as long as a link of a given bandwidth would
(``distca.dispatch.transports.throttled``). What does not depend on the plan is not measured: rows
are on the device before the step, and plans are prepared once.
"""

import time
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
from distca.data.documents import Batch
from distca.dispatch.meter import Meter
from distca.dispatch.tensors import TensorSpec
from distca.dispatch.transports.throttled import ThrottledTransport
from distca.model.config import ModelConfig
from distca.model.initialize import initialize
from distca.model.llama import Head, Leaving, Llama, on_meta
from distca.model.loss import Loss
from distca.pipeline.mesh import MeshShape
from distca.pipeline.step_plan import Half, StepPlan
from distca.planning.spans import expand
from distca.runtime.batches import Step, TokenRows
from distca.runtime.mesh import RankContext
from distca.runtime.step import StepRunner

HEAD_START_CYCLES = 10_000_000  # a few milliseconds


class Measured(NamedTuple):
    """Device seconds: of the step, of its exposed communication, and of its attention kernels.

    host_s: how long the host took to launch the step. The device waits for a host that takes longer
        than the device itself. On a CPU, it is the whole step.
    """

    step_s: float
    exposed_s: float
    attention_s: float
    host_s: float


class Replay:
    """Runs forward and backward of one rank; each call is one round.

    model: a model on one device, such as one from ``layers_of``.
    dtype: that of activations and exchanged tensors.
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
                " a replay supports one of each"
            )
        if not 0 <= rank < workers:
            raise ValueError(
                f"rank {rank} of a plan for {workers} workers: choose a rank below {workers}"
            )
        device = next(model.parameters()).device
        # The parts of a RankContext that a step uses, without process groups.
        context = SimpleNamespace(
            device=device, parallel=MeshShape(), stage=0, worker=rank, tp_mesh=None, tied_group=None
        )
        num_ranks = step.slots[0][0][0].devices.num_ranks
        transports = (ThrottledTransport(rank, num_ranks, bytes_per_s, latency_s) for _ in halves)
        attentions = tuple(CoreAttention(transport=t, backend=backend) for t in transports)
        self.model = model
        self._device, self._meter = device, Meter()
        self._runner = StepRunner(
            cast(RankContext, context), attentions, recompute=True, dtype=dtype
        )
        rows = {half: _rows(half, rank, model.config.vocab_size, device) for half in halves}
        self._step = _OneRankStep(Batch(()), step, rows)
        self._prepared = self._runner.prepare(step)

    def __call__(self) -> Measured:
        if self._device.type == "cuda":
            # The host runs ahead of the device, as it does during training.
            torch.cuda._sleep(HEAD_START_CYCLES)  # type: ignore[no-untyped-call]
        with self._meter.time("step", self._device):
            began = time.perf_counter()
            self._runner.train(self.model, self._step, self._prepared)
            host_s = time.perf_counter() - began
        self.model.zero_grad()
        taken = [attention.meter.take() for attention in self._runner.attentions]
        exposed_s, attention_s = (
            sum(one.get(name, 0.0) for one in taken) for name in ("exposed", "attention")
        )
        return Measured(self._meter.take()["step"], exposed_s, attention_s, host_s)


def measure(replay: Replay, rounds: int) -> Measured:
    """Returns the medians of some rounds after a warm-up, which compiles kernels."""
    if rounds < 1:
        raise ValueError(f"{rounds} rounds: measure 1 or more")
    replay()
    return typical([replay() for _ in range(rounds)])


def typical(rounds: Sequence[Measured]) -> Measured:
    return Measured(*map(median, zip(*rounds, strict=True)))


def share_of(config: ModelConfig, tp: int, layers: int) -> ModelConfig:
    """Returns the config of a few layers as one of ``tp`` tensor-parallel ranks holds them.

    Such a model has the rank's share of heads and widths. Norms and residuals run on all tokens,
    although sequence parallelism would split them.
    """
    share = config.shape.share(tp)
    return replace(
        config,
        layers=layers,
        heads=share.heads,
        kv_heads=share.kv_heads,
        ffn=share.ffn,
        vocab_size=-(-config.vocab_size // tp),
        tied=False,
    )


def layers_of(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Llama:
    """Builds a model without an output head on one device.

    The head and the loss are the same on every rank, and take longer than a few layers.
    """
    model = on_meta(config)
    model.seam_list[-1].head = _NoHead()
    model.to(dtype)
    initialize(model, seed=0, device=device)
    return model


def backend_of(config: ModelConfig, device: torch.device, dtype: torch.dtype, name: str) -> str:
    """Returns the name of the backend that is used; ``auto`` is resolved."""
    size = config.head_dim
    spec = TensorSpec(config.heads, config.kv_heads, size, size, dtype, device)
    masks = {config.mask_of(layer) for layer in range(config.layers)}
    return choose(name, Traits.of(spec, masks)).name


class _NoHead(Head):
    """Returns a scalar in place of a loss, so that there is something to differentiate."""

    def __init__(self) -> None:
        nn.Module.__init__(self)

    def forward(self, x: Tensor, labels: Tensor | None) -> Leaving:
        total = torch.linalg.vector_norm(x)
        return Leaving(x, loss=Loss(total, total.detach()))


@dataclass(frozen=True, eq=False)
class _OneRankStep(Step):
    """A step that has only the rows of one rank, already on its device."""

    rows_of_half: Mapping[Half, TokenRows]

    def rows(self, half: Half, worker: int) -> TokenRows:
        return self.rows_of_half[half]


def _rows(half: Half, rank: int, vocab_size: int, device: torch.device) -> TokenRows:
    """Returns random tokens with the positions that the plan gives to a rank."""
    placement = half.placement
    own = np.flatnonzero(placement.worker == rank)
    size = placement.stop[own] - placement.start[own]
    lengths = np.repeat(placement.lengths[placement.document[own]], size)
    tokens = torch.randint(vocab_size, (len(lengths),), device=device)
    positions = torch.from_numpy(expand(placement.start[own], size)).to(device)
    lengths_of_rows = torch.from_numpy(lengths).to(device)
    return TokenRows(tokens, positions, labels=tokens, lengths=lengths_of_rows)
