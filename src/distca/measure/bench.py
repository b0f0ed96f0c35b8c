"""A device with a model's sizes and a backend, on which the parts of a training step are timed.

These are fused attention calls, the linear part of a layer, whole layers, a copy and an exchange.
The data is random, and figures are medians after a warm-up. Ranks that measure together take the
mean of their figures, so that all continue with the same ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from distca.attention.backends.base import Saved, Traits
from distca.attention.backends.choice import choose
from distca.attention.backends.packed import PackedCall
from distca.dispatch.tensors import TensorSpec
from distca.model.config import ModelConfig
from distca.model.layers import After, Before
from distca.planning.masks import CAUSAL, Mask
from distca.planning.spans import as_ints
from distca.runtime.rank_device import rank_bytes, shares_gpu

MOST_CALLS = 200  # in one round
_CAUSAL = Mask(CAUSAL)


@dataclass(frozen=True)
class Scope:
    """The sizes that are measured, and the number of repetitions."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    call_queries: int  # query rows of a fused call, approximately: enough to fill the device
    call_keys: int  # key rows of a fused call, at most, unless one task has more
    linear_tokens: int
    copy_bytes: int
    exchange_bytes: tuple[int, ...]
    rounds: int  # repetitions, of which the median counts
    round_s: float  # short work is repeated until a round takes this long
    sustained_s: float  # whole layers are repeated this long, in which the clock settles
    held_out: int = 12  # held-out calls with tasks of one shape
    mixed: int = 4  # held-out calls with documents and shards

    def tasks(self, queries: int, keys: int) -> int:
        """Returns the number of tasks of this shape in a call."""
        return max(min(-(-self.call_queries // queries), self.call_keys // keys), 1)

    @classmethod
    def of(cls, device: torch.device, model: ModelConfig, quick: bool = False) -> Scope:
        """Returns a scope that takes minutes on any device; ``quick`` takes every other size."""
        step = 2 if quick else 1
        if device.type == "cpu":
            scope = cls(
                queries=_powers(6, 12, step),
                keys=_powers(6, 12 if quick else 13, step),
                call_queries=4096,
                call_keys=1 << 15,
                linear_tokens=2048,
                copy_bytes=1 << 27,
                exchange_bytes=_powers(17, 23, 3),
                rounds=5,
                round_s=0.01,
                sustained_s=0.1,
            )
        else:
            # Keys, values and their gradients, which kernels widen or compute for all heads.
            key_bytes = (16 * model.kv_heads + 4 * model.heads) * model.head_dim
            free, total = torch.cuda.mem_get_info(device)
            if shares_gpu() and dist.is_initialized():
                free = min(free, rank_bytes(total, dist.get_world_size()))
            scope = cls(
                queries=_powers(7, 17, step),
                keys=_powers(7, 17, step),
                call_queries=1 << 15,
                call_keys=min(1 << 20, free // 2 // key_bytes),  # kernels have 32-bit indices
                linear_tokens=1 << 14,
                copy_bytes=1 << 30,
                exchange_bytes=_powers(20, 29, 3),
                rounds=3,
                # Ranks that share a GPU share its power: its clock has to settle under all of them.
                round_s=0.2 if shares_gpu() else 0.02,
                sustained_s=1.0,
            )
        return replace(scope, rounds=3, held_out=6, mixed=2) if quick else scope


class Seconds(NamedTuple):
    forward: float
    backward: float


class Work(NamedTuple):
    """What is timed: two functions without arguments."""

    forward: Callable[[], object]
    backward: Callable[[], object]


class Bench:
    """Measures seconds; if ranks have joined a process group, all of them measure together.

    control: a host group of all ranks, if there are several.
    """

    def __init__(
        self,
        model: ModelConfig,
        device: torch.device,
        backend: str = "auto",
        *,
        scope: Scope | None = None,
    ) -> None:
        self.model, self.device = model, device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.scope = scope or Scope.of(device, model)
        several = dist.is_initialized() and dist.get_world_size() > 1
        self.control = dist.new_group(backend="gloo") if several else None
        self.ranks = dist.get_world_size() if several else 1
        size = model.head_dim
        spec = TensorSpec(model.heads, model.kv_heads, size, size, self.dtype, device)
        self.backend = choose(backend, Traits.of(spec, [_CAUSAL]))

    def attention(
        self, queries: Sequence[int], keys: Sequence[int], mask: Mask = _CAUSAL
    ) -> Seconds:
        """Measures one fused call of tasks (queries[i], keys[i])."""
        return Seconds(*map(self._seconds, self._attention_work(queries, keys, mask)))

    def linear(self) -> Seconds:
        """Measures a layer without its attention: products, norms and rotation."""
        return Seconds(*map(self._seconds, self._linear_work()))

    def sustained(self) -> float:
        """Measures the speed of whole layers, relative to that of their parts alone.

        A part that is measured alone runs at the clock that suits it. In training, matrix products
        bring the device to its limit of power, and attention begins at the clock that they leave.
        Both are measured in turns, since the machine may have other work at times.
        """
        tokens = [self.scope.linear_tokens]
        linear, attention = self._linear_work(), self._attention_work(tokens, tokens, _CAUSAL)
        layer = linear.forward, attention.forward, attention.backward, linear.backward

        def whole() -> None:
            for part in layer:
                part()

        ratios = [
            sum(map(self._seconds, layer)) / self._seconds(whole, self.scope.sustained_s)
            for _ in range(self.scope.rounds)
        ]
        return min(median(ratios), 1.0)  # what is above 1 is noise

    def _attention_work(self, queries: Sequence[int], keys: Sequence[int], mask: Mask) -> Work:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # shapes differ, so cached memory is of little use
        model, backend, scale = self.model, self.backend, self.model.head_dim**-0.5
        q_offsets, kv_offsets = (as_ints(np.cumsum([0, *sizes])) for sizes in (queries, keys))
        call = PackedCall.of(mask, q_offsets, kv_offsets, self.device)

        def draw(count: int, heads: int) -> Tensor:
            return torch.randn(count, heads, model.head_dim, dtype=self.dtype, device=self.device)

        q, grad = (draw(sum(queries), model.heads) for _ in range(2))
        k, v = (draw(sum(keys), model.kv_heads) for _ in range(2))
        saved = Saved(q, k, v, *backend.forward(q, k, v, call, scale))
        return Work(
            lambda: backend.forward(q, k, v, call, scale),
            lambda: backend.backward(grad, saved, call, scale),
        )

    def _linear_work(self) -> Work:
        model, tokens = self.model, self.scope.linear_tokens
        with self.device:
            before, after = Before(model).to(self.dtype), After(model).to(self.dtype)
            positions = torch.arange(tokens)
            x, attended = (
                torch.randn(shape, dtype=self.dtype, requires_grad=True)
                for shape in ((tokens, model.hidden), (tokens, model.heads, model.head_dim))
            )

        def forward() -> list[Tensor]:
            onward = after(x, attended)
            return [onward, *before(onward, positions)]

        outputs = forward()
        grads = [torch.randn_like(output) for output in outputs]
        leaves = [x, attended, *before.parameters(), *after.parameters()]
        return Work(forward, lambda: torch.autograd.grad(outputs, leaves, grads, retain_graph=True))

    def copy(self) -> float:
        """Measures a copy inside the device's memory."""
        source = torch.ones(self.scope.copy_bytes, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return self._seconds(lambda: target.copy_(source))

    def exchange(self, num_bytes: int) -> float:
        """Measures an all-to-all in which each rank sends ``num_bytes`` to all others together."""
        each = num_bytes // (self.ranks - 1)
        sent = torch.ones(each * self.ranks, dtype=torch.uint8, device=self.device)
        received = torch.empty_like(sent)
        times = []
        for _ in range(2 * self.scope.rounds):  # not until a time is up: all ranks call it as often
            dist.barrier(self.control)
            times.append(self._round(lambda: dist.all_to_all_single(received, sent), 1))
        return self._mean(median(times[self.scope.rounds :]))

    def _seconds(self, work: Callable[[], object], round_s: float | None = None) -> float:
        """Returns the seconds of one call; rounds take ``round_s``, or as long as usual."""
        self._round(work, 1)  # compiles kernels and allocates memory
        round_s = self.scope.round_s if round_s is None else round_s
        calls = round(round_s / max(self._round(work, 1), 1e-6))
        calls = min(max(calls, 1), MOST_CALLS)
        return self._mean(median(self._round(work, calls) for _ in range(self.scope.rounds)))

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
        return float(total) / self.ranks


def _powers(first: int, last: int, step: int) -> tuple[int, ...]:
    return tuple(2**power for power in range(first, last + 1, step))
