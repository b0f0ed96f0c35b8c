"""One step on every mesh against a plain loop over documents: loss, and gradients one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from quick import others_slow
from ranks import World
from runtime.bodies import TINY, Case, batch_of, one_step, plain_loop
from torch import Tensor

from distca.pipeline.mesh import MeshShape

Answer = tuple[float, dict[str, Tensor]]  # loss, and gradients by parameter
BALANCED = {"placement": "balanced"}
PING_PONG = {"ping_pong": True}
CASES: dict[str, Case] = {
    "alone": Case(),
    "alone, ping-pong": Case(**PING_PONG),
    "dp2": Case(MeshShape(dp=2)),
    "dp2, colocated": Case(MeshShape(dp=2), policy="colocated"),
    "dp2, ping-pong": Case(MeshShape(dp=2), **PING_PONG),
    "dp2, ping-pong, recomputed": Case(MeshShape(dp=2), recompute=True, **PING_PONG),
    "dp2, balanced": Case(MeshShape(dp=2), **BALANCED),
    "cp2": Case(MeshShape(cp=2)),
    "cp2, colocated": Case(MeshShape(cp=2), policy="colocated"),
    "cp2, ping-pong, balanced": Case(MeshShape(cp=2), **PING_PONG, **BALANCED),
    "tp2": Case(MeshShape(tp=2)),
    "tp2, ping-pong": Case(MeshShape(tp=2), **PING_PONG),
    "dp2 x tp2": Case(MeshShape(dp=2, tp=2)),
    "dp2 x tp2, ping-pong, balanced": Case(MeshShape(dp=2, tp=2), **PING_PONG, **BALANCED),
    "dp2 x cp2": Case(MeshShape(dp=2, cp=2)),
    "dp2 x cp2, ping-pong": Case(MeshShape(dp=2, cp=2), **PING_PONG),
    "2 + 1 server": Case(MeshShape(dp=2, servers=1)),
    "2 + 1 server, ping-pong": Case(MeshShape(dp=2, servers=1), **PING_PONG),
    "2 + 2 servers": Case(MeshShape(dp=2, servers=2)),
    "2 + 2 servers, ping-pong, recomputed": Case(
        MeshShape(dp=2, servers=2), recompute=True, **PING_PONG
    ),
    "tp2 + 2 servers": Case(MeshShape(tp=2, servers=2)),
    "dp2, two micro-batches": Case(MeshShape(dp=2), micro_batches=2),
    "dp2, weights kept": Case(MeshShape(dp=2, keep_weights=True), micro_batches=2, **PING_PONG),
    "dp2, windows": Case(MeshShape(dp=2), replace(TINY, window=20, window_pattern=2), **PING_PONG),
    "dp2, q/k norms": Case(MeshShape(dp=2), replace(TINY, qk_norm=True)),
    "tp2, q/k norms": Case(MeshShape(tp=2), replace(TINY, qk_norm=True)),
    "dp2, tied": Case(MeshShape(dp=2), replace(TINY, tied=True)),
    "dp2 x tp2, tied": Case(MeshShape(dp=2, tp=2), replace(TINY, tied=True)),
    "dp2, first layers frozen": Case(MeshShape(dp=2), frozen=2, **PING_PONG),
    "2 + 1 server, first layers frozen": Case(MeshShape(dp=2, servers=1), frozen=2, **PING_PONG),
}


FOUR = replace(TINY, layers=4)
MIXED = replace(TINY, layers=4, window=20, window_pattern=2)
PIPELINES: dict[str, Case] = {
    "pp2": Case(MeshShape(pp=2), micro_batches=3),
    "pp2, ping-pong": Case(MeshShape(pp=2), micro_batches=3, **PING_PONG),
    "pp2, ping-pong, recomputed": Case(
        MeshShape(pp=2), micro_batches=2, recompute=True, **PING_PONG
    ),
    "pp2, fewer micro-batches than stages": Case(MeshShape(pp=2)),
    "pp2, colocated": Case(MeshShape(pp=2), micro_batches=3, policy="colocated"),
    "pp2, windows": Case(MeshShape(pp=2), MIXED, micro_batches=3, **PING_PONG),
    "pp2, uneven layers": Case(MeshShape(pp=2), FOUR, micro_batches=3, stage_layers=(1, 3)),
    "pp2, uneven layers, windows, ping-pong": Case(
        MeshShape(pp=2), MIXED, micro_batches=2, stage_layers=(3, 1), **PING_PONG
    ),
    "pp2, tied": Case(MeshShape(pp=2), replace(TINY, tied=True), micro_batches=2),
    "pp2, a part of the first stage frozen": Case(
        MeshShape(pp=2), FOUR, micro_batches=3, frozen=1, **PING_PONG
    ),
    "pp2, the first stage frozen": Case(MeshShape(pp=2), FOUR, micro_batches=3, frozen=2),
    "pp2, more than the first stage frozen": Case(MeshShape(pp=2), FOUR, micro_batches=3, frozen=3),
    "pp4": Case(MeshShape(pp=4), FOUR, micro_batches=4),
    "pp4, ping-pong": Case(MeshShape(pp=4), FOUR, micro_batches=3, **PING_PONG),
    "pp2 x dp2": Case(MeshShape(pp=2, dp=2), micro_batches=3),
    "pp2 x dp2, ping-pong, balanced": Case(
        MeshShape(pp=2, dp=2), micro_batches=2, **PING_PONG, **BALANCED
    ),
    "pp2 x dp2, tied": Case(MeshShape(pp=2, dp=2), replace(TINY, tied=True), micro_batches=2),
    "pp2 x cp2": Case(MeshShape(pp=2, cp=2), micro_batches=2),
    "pp2 x tp2": Case(MeshShape(pp=2, tp=2), micro_batches=3),
    "pp2 x tp2, ping-pong, tied": Case(
        MeshShape(pp=2, tp=2), replace(TINY, tied=True), micro_batches=2, **PING_PONG
    ),
    "pp2 x dp2 + 1 server": Case(MeshShape(pp=2, dp=2, servers=1), micro_batches=2),
    "pp2 x dp2 + 1 server, ping-pong": Case(
        MeshShape(pp=2, dp=2, servers=1), micro_batches=2, **PING_PONG
    ),
}
CASES |= PIPELINES
QUICK = {name for name, case in CASES.items() if case.parallel.num_ranks < 4} | {
    "dp2 x tp2, ping-pong, balanced",
    "2 + 2 servers, ping-pong, recomputed",
    "pp4, ping-pong",
    "pp2 x dp2 + 1 server, ping-pong",
}


@pytest.mark.parametrize("name", others_slow(CASES, QUICK))
def test_one_step_is_that_of_a_plain_loop(world: World, name: str) -> None:
    case, batch = CASES[name], batch_of()
    ranks = case.parallel.num_ranks
    answers = world(ranks).run(one_step, case, batch, ranks=ranks)
    assert_equal_steps(case, answers, plain_loop(case, batch), 1e-5)


def assert_equal_steps(
    case: Case, answers: list[Answer | None], right: Answer, tolerance: float
) -> None:
    """Asserts that the loss and the gradients of all ranks are right; servers have none."""
    seen: set[str] = set()
    for loss, grads in filter(None, answers):
        assert loss == pytest.approx(right[0], rel=tolerance)
        for parameter, found in grads.items():
            grad = right[1][parameter]
            assert found.shape == grad.shape, parameter
            error = (found - grad).norm() / grad.norm().clamp_min(1e-6)
            assert torch.isfinite(error), parameter
            assert error < tolerance, f"{parameter} is off by {error:.1e}"
        seen |= grads.keys()
        if case.parallel.pp == 1:
            assert grads.keys() == right[1].keys()
    assert seen == right[1].keys()
