"""Measuring: every figure once, in any number of runs."""

from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch
from measure.measured import CPU, MODEL, TINY, tiny, together
from ranks import RankPool

from distca.measure.bench import Bench, Scope, Seconds
from distca.measure.profiling import blank, held_out_calls, measure, missing_figures
from distca.model.sizes import model_config
from distca.planning.costs.profile import Profile


def test_every_figure_is_measured() -> None:
    bench = tiny()
    seen = list(measure(bench, blank(bench, "tiny")))
    done = seen[-1][1]
    assert len({what for what, _ in seen}) == len(seen) == 5 + 2 + 4 + 1
    assert (done.missing, missing_figures(bench, done)) == ([], [])
    assert done.forward_tflops[1][0] is None  # fewer keys than queries
    assert done.linear_tflops
    assert done.copy_bytes_per_s
    assert done.sustained
    assert done.exchange == ()
    assert done.errors("forward")
    assert (done.backend, done.dtype, done.ranks, done.heads) == ("sdpa", "float32", 1, 8)


@pytest.mark.parametrize("stop", [0, 1, 4, 6, 8, 11])
def test_an_interrupted_run_goes_on(stop: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second measures what the first did not, and leaves the rest as it is."""
    calls: list[tuple[list[int], list[int]]] = []

    def count(*args: Any) -> Seconds:
        calls.append(args[-2:])
        return Seconds(1e-3 * len(calls), 2e-3)

    monkeypatch.setattr("distca.measure.bench.Bench.attention", count)
    bench = tiny()
    begun = blank(bench, "tiny")
    seen = [begun, *(profile for _, profile in islice(measure(bench, begun), stop))]
    begun = Profile.from_json(seen[-1].to_json())
    begun.check_continues(blank(bench, "tiny"))
    left = list(measure(bench, begun))
    assert len(left) == 12 - stop
    assert len(calls) == 9
    done = left[-1][1]
    assert done.missing == []
    assert done.held_out[: len(begun.held_out)] == begun.held_out
    shared = zip(begun.forward_tflops, done.forward_tflops, strict=True)
    assert all(a in (None, b) for one in shared for a, b in zip(*one, strict=True))


def test_a_rate_is_flops_over_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = Seconds(1e-3, 5e-3)
    monkeypatch.setattr("distca.measure.bench.Bench.attention", lambda *_: seconds)
    bench = tiny()
    _, profile = next(measure(bench, blank(bench, "tiny")))
    flops = 4 * (16 * 17 // 2) * 4 * MODEL.heads * MODEL.head_dim  # four tasks of 16 rows
    assert profile.forward_tflops[0][0] == pytest.approx(flops / 1e-3 / 1e12, rel=1e-3)
    assert profile.backward_tflops[0][0] == pytest.approx(2.5 * flops / 5e-3 / 1e12, rel=1e-3)


@pytest.mark.parametrize(("seconds", "ratio"), [(5.0, 0.8), (3.0, 1.0)])
def test_whole_layers_are_compared_with_their_parts(
    seconds: float, ratio: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four parts of 1 s each, measured in turns with all of them one after the other."""
    times = iter([1.0, 1.0, 1.0, 1.0, seconds] * 3)
    monkeypatch.setattr("distca.measure.bench.Bench._seconds", lambda *_: next(times))
    assert tiny(replace(TINY, rounds=3)).sustained() == pytest.approx(ratio)
    assert [*times] == []


@pytest.mark.parametrize("quick", [False, True])
def test_held_out_calls_lie_between_the_measured_shapes(quick: bool) -> None:
    scope = Scope.of(CPU, MODEL, quick)
    calls = held_out_calls(scope)
    assert calls == held_out_calls(scope)
    assert len(calls) == scope.held_out + scope.mixed
    for call in calls:
        for queries, keys in zip(call.queries, call.keys, strict=True):
            assert scope.queries[0] <= queries <= keys <= scope.keys[-1]
            assert queries <= scope.queries[-1]
    off = [c for c in calls if (c.queries[0], c.keys[0]) not in {(q, q) for q in scope.queries}]
    assert len(off) > len(calls) // 2
    assert all(len(call.queries) > 2 for call in calls[scope.held_out :])


def test_a_backend_that_refuses_says_why() -> None:
    with pytest.raises(ValueError, match="flash refuses: it needs a CUDA device"):
        Bench(MODEL, CPU, "flash", scope=TINY)


def test_ranks_agree_on_what_they_measured(world: Any) -> None:
    pool: RankPool = world(2)
    first, second = pool.run(together, ranks=2)
    assert first == second
    assert first.ranks == 2
    assert [one.bytes for one in first.exchange] == [1000, 4000]
    assert all(one.bytes_per_s > 0 for one in first.exchange)


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    device = torch.device("cuda", 0)
    model = model_config("llama3-8b")
    scope = replace(Scope.of(device, model, quick=True), queries=(128, 512), keys=(128, 2048))
    bench = Bench(model, device, scope=replace(scope, linear_tokens=1024, held_out=3, mixed=0))
    *_, (_, done) = measure(bench, blank(bench, "gpu"))
    assert done.dtype == "bfloat16"
    assert done.missing == []
