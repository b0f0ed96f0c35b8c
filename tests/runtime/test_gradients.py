"""One step on every mesh against a plain loop over documents: loss, and gradients one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from ranks import World
from runtime.bodies import TINY, Case, batch_of, one_step, plain_loop

from distca.runtime.mesh import Parallel

BALANCED = {"placement": "balanced"}
PING_PONG = {"ping_pong": True}
CASES: dict[str, Case] = {
    "alone": Case(),
    "alone, ping-pong": Case(**PING_PONG),
    "dp2": Case(Parallel(dp=2)),
    "dp2, colocated": Case(Parallel(dp=2), policy="colocated"),
    "dp2, ping-pong": Case(Parallel(dp=2), **PING_PONG),
    "dp2, ping-pong, recomputed": Case(Parallel(dp=2), recompute=True, **PING_PONG),
    "dp2, balanced": Case(Parallel(dp=2), **BALANCED),
    "cp2": Case(Parallel(cp=2)),
    "cp2, colocated": Case(Parallel(cp=2), policy="colocated"),
    "cp2, ping-pong, balanced": Case(Parallel(cp=2), **PING_PONG, **BALANCED),
    "tp2": Case(Parallel(tp=2)),
    "tp2, ping-pong": Case(Parallel(tp=2), **PING_PONG),
    "dp2 x tp2": Case(Parallel(dp=2, tp=2)),
    "dp2 x tp2, ping-pong, balanced": Case(Parallel(dp=2, tp=2), **PING_PONG, **BALANCED),
    "dp2 x cp2": Case(Parallel(dp=2, cp=2)),
    "dp2 x cp2, ping-pong": Case(Parallel(dp=2, cp=2), **PING_PONG),
    "2 + 1 server": Case(Parallel(dp=2, servers=1)),
    "2 + 1 server, ping-pong": Case(Parallel(dp=2, servers=1), **PING_PONG),
    "2 + 2 servers": Case(Parallel(dp=2, servers=2)),
    "2 + 2 servers, ping-pong, recomputed": Case(
        Parallel(dp=2, servers=2), recompute=True, **PING_PONG
    ),
    "tp2 + 2 servers": Case(Parallel(tp=2, servers=2)),
    "dp2, two micro-batches": Case(Parallel(dp=2), micro_batches=2),
    "dp2, windows": Case(Parallel(dp=2), replace(TINY, window=20, window_pattern=2), **PING_PONG),
    "dp2, q/k norms": Case(Parallel(dp=2), replace(TINY, qk_norm=True)),
    "tp2, q/k norms": Case(Parallel(tp=2), replace(TINY, qk_norm=True)),
    "dp2, tied": Case(Parallel(dp=2), replace(TINY, tied=True)),
    "dp2 x tp2, tied": Case(Parallel(dp=2, tp=2), replace(TINY, tied=True)),
    "dp2, first layers frozen": Case(Parallel(dp=2), frozen=2, **PING_PONG),
    "2 + 1 server, first layers frozen": Case(Parallel(dp=2, servers=1), frozen=2, **PING_PONG),
}


@pytest.mark.parametrize("name", CASES)
def test_one_step_is_that_of_a_plain_loop(world: World, name: str) -> None:
    case, batch = CASES[name], batch_of()
    loss, right = plain_loop(case, batch)
    ranks = case.parallel.num_ranks
    for answer in world(ranks).run(one_step, case, batch, ranks=ranks):
        if answer is None:
            continue
        found_loss, grads = answer
        assert found_loss == pytest.approx(loss, rel=1e-5)
        assert grads.keys() == right.keys()
        for parameter, grad in right.items():
            assert grads[parameter].shape == grad.shape, parameter
            error = (grads[parameter] - grad).norm() / grad.norm().clamp_min(1e-6)
            assert torch.isfinite(error), parameter
            assert error < 1e-5, f"{parameter} is off by {error:.1e}"
