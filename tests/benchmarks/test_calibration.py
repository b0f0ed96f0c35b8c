"""Calls that follow known constants give these constants back, and noise changes them little."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np
import pytest

from distca.planning.costs.analytic import KernelCost
from distca.planning.costs.base import BACKWARD_FLOPS, PS, CostModel
from distca.planning.models import model_shape

# By its path: ``benchmarks`` on ``sys.path`` would hide folders of tests with the same names.
PATH = Path(__file__).parents[2] / "benchmarks" / "calibration.py"
spec = spec_from_file_location("calibration", PATH)
assert spec is not None
assert spec.loader is not None
calibration = sys.modules["calibration"] = module_from_spec(spec)
spec.loader.exec_module(calibration)
TimedCall, calibrated = calibration.TimedCall, calibration.calibrated

SHAPE = model_shape("llama3-8b")
FLOPS = SHAPE.flops_per_pair
TRUE = CostModel(
    "true",
    forward=KernelCost(FLOPS, tflops=500.0, row_keys=300.0, key_queries=0.0, task_s=1e-6),
    backward=KernelCost(
        BACKWARD_FLOPS * FLOPS, tflops=400.0, row_keys=200.0, key_queries=150.0, task_s=3e-6
    ),
)


def timed(rng: np.random.Generator, noise: float = 0.0) -> TimedCall:
    """Some documents and shards, as a server gets them."""
    tasks = int(rng.integers(1, 60))
    keys = np.rint(np.exp(rng.uniform(5, 11.5, tasks))).astype(np.int64)
    queries = np.maximum(np.rint(keys * rng.uniform(0.05, 1.0, tasks)).astype(np.int64), 1)
    pairs = queries * keys - queries * (queries - 1) // 2
    off = np.exp(noise * rng.standard_normal(2))
    return TimedCall(
        queries,
        keys,
        pairs,
        forward_s=float(TRUE.forward.ps(queries, keys, pairs).sum() / PS * off[0]),
        backward_s=float(TRUE.backward.ps(queries, keys, pairs).sum() / PS * off[1]),
    )


def worst_error(found: CostModel, calls: list[TimedCall]) -> float:
    return max(
        abs(float(cost.ps(call.queries, call.keys, call.pairs).sum()) / PS / seconds - 1)
        for call in calls
        for cost, seconds in (
            (found.forward, call.forward_s),
            (found.backward, call.backward_s),
        )
    )


def test_known_constants_are_found_again() -> None:
    rng = np.random.default_rng(0)
    found = calibrated(SHAPE, [timed(rng) for _ in range(30)], "measured")
    assert found.name == "measured"
    assert found.forward.tflops == pytest.approx(500, rel=1e-3)
    assert found.backward.key_queries == pytest.approx(150, rel=1e-2)
    assert found.forward.key_queries == pytest.approx(0, abs=0.1)
    assert worst_error(found, [timed(rng) for _ in range(20)]) < 1e-3


def test_noise_does_not_make_costs_negative() -> None:
    rng = np.random.default_rng(1)
    found = calibrated(SHAPE, [timed(rng, noise=0.05) for _ in range(30)], "measured")
    for rate in (found.forward, found.backward):
        assert min(rate.row_keys, rate.key_queries, rate.task_s) >= 0
        assert rate.tflops > 0
    assert worst_error(found, [timed(rng) for _ in range(20)]) < 0.1


def test_one_call_gives_a_rate() -> None:
    call = timed(np.random.default_rng(2))
    assert worst_error(calibrated(SHAPE, [call], "one"), [call]) < 1e-6


def test_nothing_measured_is_refused() -> None:
    with pytest.raises(ValueError, match="no timed calls"):
        calibrated(SHAPE, [], "none")
    with pytest.raises(ValueError, match="above 0 s"):
        calibrated(SHAPE, [replace(timed(np.random.default_rng(3)), forward_s=0.0)], "none")


def test_times_that_do_not_grow_are_refused() -> None:
    sizes = (np.array([size]) for size in (128, 4096, 65536))
    calls = [TimedCall(size, size, size * (size + 1) // 2, 1.0, 1.0) for size in sizes]
    with pytest.raises(ValueError, match="do not grow with query-key pairs"):
        calibrated(SHAPE, calls, "constant")
