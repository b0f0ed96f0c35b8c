"""One step on every mesh against a plain loop on one device, as in tests/runtime, over NCCL."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from ranks import World
from runtime.bodies import TINY, Case, batch_of, one_step, plain_step
from runtime.test_gradients import CASES, assert_equal_steps

from distca.model.config import ModelConfig
from distca.pipeline.mesh import MeshShape

pytestmark = pytest.mark.nccl
EIGHT: dict[str, Case] = {
    "pp2 x dp2 x tp2, ping-pong": Case(
        MeshShape(pp=2, dp=2, tp=2), micro_batches=2, ping_pong=True
    ),
    "dp2 x cp2 x tp2, balanced": Case(MeshShape(dp=2, cp=2, tp=2), placement="balanced"),
    "6 + 2 servers, ping-pong, recomputed": Case(
        MeshShape(dp=6, servers=2), ping_pong=True, recompute=True
    ),
    "pp4 x dp2": Case(MeshShape(pp=4, dp=2), replace(TINY, layers=4), micro_batches=3),
}
COMPILED: dict[str, Case] = {
    f"{name}, compiled": replace(CASES[name], compile=True)
    for name in ("dp2, ping-pong, recomputed", "pp2")
}
SHARED = {name: case for name, case in CASES.items() if case.parallel.num_ranks > 1}
SHARED |= EIGHT | COMPILED
# Ranks of one size are started together.
BY_SIZE = sorted(SHARED, key=lambda name: SHARED[name].parallel.num_ranks)


@pytest.mark.parametrize("name", BY_SIZE)
def test_one_step_is_that_of_a_plain_loop(gpu_world: World, name: str) -> None:
    case, batch = SHARED[name], batch_of()
    ranks = case.parallel.num_ranks
    (right,) = gpu_world(ranks).run(plain_step, case, batch, ranks=1)
    answers = gpu_world(ranks).run(one_step, case, batch, ranks=ranks)
    assert_equal_steps(case, answers, right, 1e-4)


# Of 32K tokens in a micro-batch: 64 MiB between stages, far more than NCCL's own buffers hold.
LARGE = ModelConfig(
    vocab_size=61, hidden=1024, layers=4, heads=8, kv_heads=8, head_dim=128, ffn=1024
)
LARGE_CASE = Case(config=LARGE, dtype=torch.bfloat16, backend="auto", micro_batches=2)


@pytest.mark.parametrize("ping_pong", [False, True])
@pytest.mark.parametrize("stages", [2, 4])
def test_stages_pass_on_more_than_nccl_buffers(
    gpu_world: World, stages: int, ping_pong: bool
) -> None:
    batch = batch_of((8192,) * 7 + (4096, 4000, 95, 1))
    piped = replace(LARGE_CASE, parallel=MeshShape(pp=stages), ping_pong=ping_pong)
    plain = replace(LARGE_CASE, parallel=MeshShape(dp=stages), policy="colocated")
    (right, *_), answers = (
        gpu_world(stages).run(one_step, case, batch, ranks=stages) for case in (plain, piped)
    )
    assert right is not None
    assert_equal_steps(piped, answers, right, 3e-2)  # bfloat16, in another order
