"""Measures a device for the planner's cost model and the simulator, one figure at a time.

``measure`` completes a profile and yields it after each figure, so that a caller can show progress
and save it, and an interrupted measurement can be continued.
"""

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

from distca import __version__
from distca.measure.bench import Bench, Scope
from distca.planning.costs.analytic import TILE
from distca.planning.costs.base import BACKWARD_FLOPS, PS
from distca.planning.costs.profile import HeldOut, MeasuredExchange, Profile
from distca.planning.costs.table import table_cost
from distca.planning.spans import Ints, as_ints

TILED = ("fa4", "flash")  # backends that compute TILE rows together, full or not


def blank(bench: Bench, name: str) -> Profile:
    """Returns a profile without any figures."""
    nothing = ((None,) * len(bench.scope.keys),) * len(bench.scope.queries)
    versions = {"distca": __version__, "torch": torch.__version__}
    if bench.backend.name == "fa4":
        with suppress(PackageNotFoundError):  # it may be importable without being installed
            versions["flash-attn-4"] = version("flash-attn-4")
    return Profile(
        name=name,
        queries=bench.scope.queries,
        keys=bench.scope.keys,
        forward_tflops=nothing,
        backward_tflops=nothing,
        tile=TILE if bench.backend.name in TILED else 1,
        device=device_name(bench.device),
        backend=bench.backend.name,
        dtype=str(bench.dtype).removeprefix("torch."),
        ranks=bench.ranks,
        heads=bench.model.heads,
        kv_heads=bench.model.kv_heads,
        head_dim=bench.model.head_dim,
        hidden=bench.model.hidden,
        ffn=bench.model.ffn,
        date=str(date.today()),
        versions=versions,
    )


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
    calls = held_out_calls(bench.scope)
    for number, call in list(enumerate(calls, start=1))[len(profile.held_out) :]:
        found.append((f"held out, {number} of {len(calls)}", partial(_held_out, bench, call)))
    if profile.sustained is None:  # the last, since held-out calls are measured alone as well
        found.append(("whole layers", partial(_sustained, bench)))
    return found


def _attention(bench: Bench, row: int, column: int, profile: Profile) -> Profile:
    queries, keys = profile.queries[row], profile.keys[column]
    tasks = bench.scope.tasks(queries, keys)
    taken = bench.attention([queries] * tasks, [keys] * tasks)
    pairs = tasks * int(_causal_pairs(as_ints([queries]), as_ints([keys]))[0])
    flops = pairs * bench.model.shape.flops_per_pair
    forward, backward = flops / taken.forward, BACKWARD_FLOPS * flops / taken.backward
    return profile.with_rates(row, column, _short(forward / 1e12), _short(backward / 1e12))


def _linear(bench: Bench, profile: Profile) -> Profile:
    # Backward has twice as many FLOPs as forward.
    flops = 3 * bench.scope.linear_tokens * bench.model.shape.linear_flops_per_token
    return replace(profile, linear_tflops=_short(flops / sum(bench.linear()) / 1e12))


def _sustained(bench: Bench, profile: Profile) -> Profile:
    return replace(profile, sustained=_short(bench.sustained()))


def _copy(bench: Bench, profile: Profile) -> Profile:
    return replace(profile, copy_bytes_per_s=_short(2 * bench.scope.copy_bytes / bench.copy()))


def _exchange(bench: Bench, size: int, profile: Profile) -> Profile:
    speed = _short(size / bench.exchange(size))
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


def held_out_calls(scope: Scope) -> list[HeldOutCall]:
    """Returns calls with sizes between those of the table, the same in every run.

    Some have tasks of one shape, of which a third are whole documents; others have documents and a
    few shards, as plans do.
    """
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
        calls.append(HeldOutCall((queries,), (keys,), scope.tasks(queries, keys)))
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


def _short(value: float) -> float:
    """Rounds to four digits; more are noise."""
    return float(f"{value:.4g}")
