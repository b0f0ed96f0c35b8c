"""Attention of ranks that exchange over NCCL: exact, with late exchanges too, in flat memory."""

from __future__ import annotations

import pytest
import torch
from attention.bodies import FACES, exact
from attention.test_distributed import CASES
from attention.tokens import Tokens, assert_exact, errors
from nccl.bodies import (
    HEADS,
    attended_late,
    attention_before_exchange,
    disagreeing,
    memory_of_changing_plans,
)
from ranks import World
from strategies import Batch

pytestmark = pytest.mark.nccl
DOCUMENTS = [[1500], [640, 70, 1], [], [500, 331]]


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("case", [name for name, (ranks, _) in CASES.items() if ranks > 1])
def test_attention_is_exact(gpu_world: World, case: str, face: str) -> None:
    ranks, batch = CASES[case]
    tokens = Tokens(plan := batch.plan(), torch.float64)
    options = {"backend": "reference", "deterministic": True, "face": face}
    found = gpu_world(4).run(exact, plan, tokens, "cuda", options, ranks=ranks)
    assert_exact(tokens.gathered(found), tokens.expected(), torch.float64)


@pytest.mark.parametrize("backend", ["flash", "sdpa"])
def test_late_exchanges_into_poisoned_buffers_give_the_same_bits(
    gpu_world: World, backend: str
) -> None:
    plan = Batch(DOCUMENTS).plan(cost="pairs")
    tokens = Tokens(plan, torch.bfloat16, HEADS)
    right, late = (
        tokens.gathered(gpu_world(4).run(attended_late, plan, tokens, backend, is_late, ranks=4))
        for is_late in (False, True)
    )
    assert max(errors(right, tokens.expected()).values()) < 1e-2
    assert all(torch.equal(a, b) for a, b in zip(right, late, strict=True))


def test_memory_is_flat_over_300_changing_plans(gpu_world: World) -> None:
    """Plans repeat after a hundred, so that buffers have grown to their largest size by then."""
    for allocated in gpu_world(4).run(memory_of_changing_plans, 300, 100, ranks=4):
        first, *later = (max(allocated[at : at + 100]) for at in (0, 100, 200))
        above = {step: n - first for step, n in enumerate(allocated) if n > first}
        assert max(later) <= first, f"bytes above the first hundred steps, by step: {above}"


def test_exchanges_overtake_attention(gpu_world: World) -> None:
    """Else, ranks wait for data until kernels end that were launched before."""
    shares = gpu_world(2).run(attention_before_exchange, ranks=2)
    assert max(shares) < 0.5, shares


@pytest.mark.parametrize("sizes", ["equal", "different"])
def test_another_plan_on_one_rank_is_told_on_every_rank(gpu_world: World, sizes: str) -> None:
    """Sizes that differ block the device, which the error has to free."""
    documents = {"equal": ([1200, 800], [800, 1200]), "different": ([2000], [3000])}[sizes]
    plans = [Batch([mine, [8]]).plan(cost="pairs") for mine in documents]
    pool = gpu_world(2)
    try:
        for error in pool.run(disagreeing, plans, ranks=2):
            assert error.startswith("DisagreementError: the ranks disagree on the plan: "), error
    finally:
        pool.is_usable = False  # its communicators are aborted
        pool.close()
