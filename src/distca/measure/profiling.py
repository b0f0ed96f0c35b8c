"""Measures a device for the planner's cost model and the simulator, one figure at a time.

``measure`` completes a profile and yields it after each figure, so that a caller can show progress
and save it, and an interrupted measurement can be continued.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from distca import __version__
from distca.attention.backends.base import Backend, Traits
from distca.attention.backends.choice import choose
from distca.dispatch.tensors import TensorSpec
from distca.measure.timing import Clock, Seconds, attention_s, copy_s, exchange_s, linear_s
from distca.model.config import ModelConfig
from distca.planning.costs.analytic import TILE
from distca.planning.costs.base import BACKWARD_FLOPS, PS
from distca.planning.costs.profile import HeldOut, MeasuredExchange, Profile
from distca.planning.costs.table import table_cost
from distca.planning.masks import CAUSAL, Mask
from distca.planning.spans import Ints, as_ints

TILED = ("fa4", "flash")  # backends that compute TILE rows together, full or not


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
    rounds: int
    round_s: float
    held_out: int = 12  # held-out calls with tasks of one shape
    mixed: int = 4  # held-out calls with documents and shards

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
            )
        else:
            # Keys, values and their gradients, which kernels widen or compute for all heads.
            key_bytes = (16 * model.kv_heads + 4 * model.heads) * model.head_dim
            free, _ = torch.cuda.mem_get_info(device)
            scope = cls(
                queries=_powers(7, 17, step),
                keys=_powers(7, 17, step),
                call_queries=1 << 15,
                call_keys=min(1 << 20, free // 2 // key_bytes),  # kernels have 32-bit indices
                linear_tokens=1 << 14,
                copy_bytes=1 << 30,
                exchange_bytes=_powers(20, 29, 3),
                rounds=3,
                round_s=0.02,
            )
        return replace(scope, rounds=3, held_out=6, mixed=2) if quick else scope


@dataclass(frozen=True, eq=False)
class Bench:
    """A device with a model's sizes and a backend, ready to be measured."""

    model: ModelConfig
    dtype: torch.dtype
    backend: Backend
    scope: Scope
    clock: Clock

    @classmethod
    def of(
        cls,
        model: ModelConfig,
        device: torch.device,
        backend: str = "auto",
        *,
        scope: Scope | None = None,
    ) -> Bench:
        """Returns a bench; if ranks have joined a process group, all of them measure together."""
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        scope = scope or Scope.of(device, model)
        several = dist.is_initialized() and dist.get_world_size() > 1
        control = dist.new_group(backend="gloo") if several else None
        spec = TensorSpec(model.heads, model.kv_heads, model.head_dim, dtype, device)
        chosen = choose(backend, Traits.of(spec, [Mask(CAUSAL)]))
        clock = Clock(device, scope.rounds, scope.round_s, control)
        return cls(model, dtype, chosen, scope, clock)

    @property
    def ranks(self) -> int:
        return 1 if self.clock.control is None else dist.get_world_size(self.clock.control)

    def blank(self, name: str) -> Profile:
        nothing = ((None,) * len(self.scope.keys),) * len(self.scope.queries)
        versions = {"distca": __version__, "torch": torch.__version__}
        if self.backend.name == "fa4":
            with suppress(PackageNotFoundError):  # it may be importable without being installed
                versions["flash-attn-4"] = version("flash-attn-4")
        return Profile(
            name=name,
            queries=self.scope.queries,
            keys=self.scope.keys,
            forward_tflops=nothing,
            backward_tflops=nothing,
            tile=TILE if self.backend.name in TILED else 1,
            device=device_name(self.clock.device),
            backend=self.backend.name,
            dtype=str(self.dtype).removeprefix("torch."),
            ranks=self.ranks,
            heads=self.model.heads,
            kv_heads=self.model.kv_heads,
            head_dim=self.model.head_dim,
            hidden=self.model.hidden,
            ffn=self.model.ffn,
            date=str(date.today()),
            versions=versions,
        )

    def attention(self, queries: list[int], keys: list[int]) -> Seconds:
        if self.clock.device.type == "cuda":
            torch.cuda.empty_cache()  # shapes differ, so cached memory is of little use
        return attention_s(self.clock, self.backend, self.model, self.dtype, queries, keys)

    def tasks(self, queries: int, keys: int) -> int:
        """Returns the number of tasks of this shape in a call."""
        return max(min(-(-self.scope.call_queries // queries), self.scope.call_keys // keys), 1)


Figure = tuple[str, Callable[[Profile], Profile]]  # a figure's name, and its measurement


def measure(bench: Bench, profile: Profile) -> Iterator[tuple[str, Profile]]:
    """Measures the missing figures; yields the name of each and the profile with it."""
    for what, take in missing_figures(bench, profile):
        profile = take(profile)
        yield what, profile


def missing_figures(bench: Bench, profile: Profile) -> list[Figure]:
    """Returns what is to be measured: the table before the calls that are compared with it."""
    scope = bench.scope
    found: list[Figure] = [
        (
            f"attention, {profile.queries[row]} queries x {profile.keys[column]} keys",
            partial(_attention, bench, row, column),
        )
        for row, column in profile.missing
    ]
    if profile.linear_tflops is None:
        found.append(("linear layers", partial(_linear, bench)))
    if profile.copy_bytes_per_s is None:
        found.append(("copy", partial(_copy, bench)))
    if bench.ranks > 1:
        for size in scope.exchange_bytes[len(profile.exchange) :]:
            found.append((f"exchange, {size} bytes", partial(_exchange, bench, size)))
    calls = held_out_calls(bench)
    for number, call in list(enumerate(calls, start=1))[len(profile.held_out) :]:
        found.append((f"held out, {number} of {len(calls)}", partial(_held_out, bench, call)))
    return found


def _attention(bench: Bench, row: int, column: int, profile: Profile) -> Profile:
    queries, keys = profile.queries[row], profile.keys[column]
    tasks = bench.tasks(queries, keys)
    taken = bench.attention([queries] * tasks, [keys] * tasks)
    pairs = tasks * int(_causal_pairs(as_ints([queries]), as_ints([keys]))[0])
    flops = pairs * bench.model.shape.flops_per_pair
    forward, backward = flops / taken.forward, BACKWARD_FLOPS * flops / taken.backward
    return profile.with_rates(row, column, _short(forward / 1e12), _short(backward / 1e12))


def _linear(bench: Bench, profile: Profile) -> Profile:
    tokens = bench.scope.linear_tokens
    taken = linear_s(bench.clock, bench.model, bench.dtype, tokens)
    flops = 3 * tokens * bench.model.shape.linear_flops_per_token  # backward has twice as many
    return replace(profile, linear_tflops=_short(flops / sum(taken) / 1e12))


def _copy(bench: Bench, profile: Profile) -> Profile:
    size = bench.scope.copy_bytes
    return replace(profile, copy_bytes_per_s=_short(2 * size / copy_s(bench.clock, size)))


def _exchange(bench: Bench, size: int, profile: Profile) -> Profile:
    speed = _short(size / exchange_s(bench.clock, size))
    return replace(profile, exchange=(*profile.exchange, MeasuredExchange(size, speed)))


@dataclass(frozen=True)
class HeldOutCall:
    """A fused call that checks the interpolation between the sizes of the table."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    repeat: int = 1


def _held_out(bench: Bench, call: HeldOutCall, profile: Profile) -> Profile:
    taken = bench.attention(list(call.queries) * call.repeat, list(call.keys) * call.repeat)
    model = table_cost(profile, bench.model.shape)
    queries, keys = as_ints(call.queries), as_ints(call.keys)
    tasks = (queries, keys, _causal_pairs(queries, keys))
    predicted = [
        int(cost.ps(*tasks).sum()) * call.repeat / PS for cost in (model.forward, model.backward)
    ]
    figures = [_short(seconds) for seconds in (*taken, *predicted)]
    held_out = HeldOut(call.queries, call.keys, call.repeat, *figures)
    return replace(profile, held_out=(*profile.held_out, held_out))


def held_out_calls(bench: Bench) -> list[HeldOutCall]:
    """Returns calls with sizes between those of the table, the same in every run.

    Some have tasks of one shape, of which a third are whole documents; others have documents and a
    few shards, as plans do.
    """
    scope = bench.scope
    draw = np.random.default_rng(0)
    least, most = scope.queries[0], min(scope.queries[-1], scope.keys[-1])

    def between(low: int, high: int) -> int:
        return round(float(np.exp(draw.uniform(np.log(low), np.log(high)))))

    def document() -> tuple[int, int]:
        length = between(least, most)
        return length, length

    def shard() -> tuple[int, int]:
        """Draws a shard that is cut at tiles, as planners do."""
        tile = min(TILE, least)
        keys = max(between(2 * least, scope.keys[-1]) // tile * tile, tile)
        return max(between(least, min(keys, most)) // tile * tile, tile), keys

    calls = []
    for number in range(scope.held_out):
        queries, keys = shard() if number % 3 else document()
        calls.append(HeldOutCall((queries,), (keys,), bench.tasks(queries, keys)))
    for _ in range(scope.mixed):
        tasks = [shard(), shard()]
        while sum(queries for queries, _ in tasks) < scope.call_queries:
            tasks.append(document())
        queries_of, keys_of = zip(*tasks, strict=True)
        calls.append(HeldOutCall(queries_of, keys_of))
    return calls


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_cpu_name()}, threads: {torch.get_num_threads()}"


def _cpu_name() -> str:
    listed = Path("/proc/cpuinfo")
    for line in listed.read_text().splitlines() if listed.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _causal_pairs(queries: Ints, keys: Ints) -> Ints:
    return queries * keys - queries * (queries - 1) // 2


def _powers(first: int, last: int, step: int) -> tuple[int, ...]:
    return tuple(2**power for power in range(first, last + 1, step))


def _short(value: float) -> float:
    """Rounds to four digits; more are noise."""
    return float(f"{value:.4g}")
