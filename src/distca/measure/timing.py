"""Measures the parts of a training step on a device: fused attention calls, the linear part of a
layer, a copy and an exchange. The data is random, and figures are medians after a warm-up.

Ranks that measure together take the mean of their figures, so that all continue with the same ones.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from distca.attention.backends.base import Backend, PackedCall, Saved
from distca.model.config import ModelConfig
from distca.model.layers import After, Before
from distca.planning.masks import CAUSAL, Mask
from distca.planning.spans import as_ints

MOST_CALLS = 50  # in one round


class Seconds(NamedTuple):
    forward: float
    backward: float


@dataclass(frozen=True, eq=False)
class Clock:
    """Measures the seconds of work on a device."""

    device: torch.device
    rounds: int  # repetitions, of which the median counts
    round_s: float  # short work is repeated until a round takes this long
    control: dist.ProcessGroup | None = None  # a host group of all ranks, if there are several

    def of(self, work: Callable[[], object]) -> float:
        self._round(work, 1)  # compiles kernels and allocates memory
        calls = round(self.round_s / max(self._round(work, 1), 1e-6))
        calls = min(max(calls, 1), MOST_CALLS)
        return self._mean(median(self._round(work, calls) for _ in range(self.rounds)))

    def together(self, work: Callable[[], object]) -> float:
        """Returns the seconds of a collective, which all ranks call equally often."""
        times = []
        for _ in range(2 * self.rounds):
            dist.barrier(self.control)
            times.append(self._round(work, 1))
        return self._mean(median(times[self.rounds :]))

    def _round(self, work: Callable[[], object], calls: int) -> float:
        """Returns the seconds of one call."""
        if self.device.type == "cuda":
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            if calls > 1:
                work()  # keeps the device busy while the host queues the others
            start.record()
            for _ in range(calls):
                work()
            stop.record()
            stop.synchronize()
            return float(start.elapsed_time(stop)) / 1e3 / calls
        began = time.perf_counter()
        for _ in range(calls):
            work()
        return (time.perf_counter() - began) / calls

    def _mean(self, seconds: float) -> float:
        if self.control is None:
            return seconds
        total = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(total, group=self.control)
        return float(total) / dist.get_world_size(self.control)


def attention_s(
    clock: Clock,
    backend: Backend,
    model: ModelConfig,
    dtype: torch.dtype,
    queries: Sequence[int],
    keys: Sequence[int],
) -> Seconds:
    """Measures one fused call of causal tasks (queries[i], keys[i])."""
    q_offsets, kv_offsets = (as_ints(np.cumsum([0, *sizes])) for sizes in (queries, keys))
    rows, key_rows = int(q_offsets[-1]), int(kv_offsets[-1])
    call = PackedCall.of(Mask(CAUSAL), q_offsets, kv_offsets, clock.device)
    scale = model.head_dim**-0.5

    def draw(count: int, heads: int) -> Tensor:
        return torch.randn(count, heads, model.head_dim, dtype=dtype, device=clock.device)

    q, grad = draw(rows, model.heads), draw(rows, model.heads)
    k, v = draw(key_rows, model.kv_heads), draw(key_rows, model.kv_heads)
    saved = Saved(q, k, v, *backend.forward(q, k, v, call, scale))
    return Seconds(
        clock.of(lambda: backend.forward(q, k, v, call, scale)),
        clock.of(lambda: backend.backward(grad, saved, call, scale)),
    )


def linear_s(clock: Clock, model: ModelConfig, dtype: torch.dtype, tokens: int) -> Seconds:
    """Measures a layer without its attention: products, norms and rotation."""
    with clock.device:
        before, after = Before(model).to(dtype), After(model).to(dtype)
        positions = torch.arange(tokens)
        x = torch.randn(tokens, model.hidden, dtype=dtype, requires_grad=True)
        shape = (tokens, model.heads, model.head_dim)
        attended = torch.randn(shape, dtype=dtype, requires_grad=True)

    def forward() -> list[Tensor]:
        onward = after(x, attended)
        return [onward, *before(onward, positions)]

    outputs = forward()
    grads = [torch.randn_like(output) for output in outputs]
    leaves = [x, attended, *before.parameters(), *after.parameters()]
    return Seconds(
        clock.of(forward),
        clock.of(lambda: torch.autograd.grad(outputs, leaves, grads, retain_graph=True)),
    )


def copy_s(clock: Clock, num_bytes: int) -> float:
    """Measures a copy inside the device's memory."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=clock.device)
    target = torch.empty_like(source)
    return clock.of(lambda: target.copy_(source))


def exchange_s(clock: Clock, num_bytes: int) -> float:
    """Measures an all-to-all in which each rank sends ``num_bytes`` to all others together."""
    ranks = dist.get_world_size()
    each = num_bytes // (ranks - 1)
    sent = torch.ones(each * ranks, dtype=torch.uint8, device=clock.device)
    received = torch.empty_like(sent)
    return clock.together(lambda: dist.all_to_all_single(received, sent))
