"""Real processes: gloo on the CPU, and (marked gpu) gloo on CUDA tensors.

The processes of a test are asked, not started, for each case (tests/ranks.py).
"""

from __future__ import annotations

import re
import time

import pytest
import torch
from attention.bodies import FACES, exact, model_gradients, refused
from attention.test_exact import on_all_ranks
from attention.tokens import Tokens, assert_exact, errors
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from planning.oracles import planned
from ranks import RankPool
from strategies import Batch, batches

DEVICES = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
)  # several processes on one GPU use gloo
GRAIN = {"tile": 16, "min_shard": 16}
SPANNING = [{"document": 0, "start": a, "stop": b} for a, b in ((0, 150), (150, 201), (201, 222))]
CASES: dict[str, tuple[int, Batch]] = {
    "alone": (1, Batch([[90, 7, 1]], GRAIN)),
    "two": (2, Batch([[201], [64, 7, 1]], GRAIN)),
    "an empty worker": (2, Batch([[130, 5], []], GRAIN)),
    "full": (2, Batch([[201], [64, 7, 1]], {"mask": "full", **GRAIN})),
    "a dedicated server": (2, Batch([[130, 1, 7]], {"servers": 1, **GRAIN})),
    "spanning": (3, Batch([[SPANNING[0]], [SPANNING[1], 64], [SPANNING[2], 1]], GRAIN)),
    "window": (3, Batch([[222], [9] * 4, [1]], {"mask": "window:40", **GRAIN})),
    "chunks": (3, Batch([[222], [9] * 4, [50]], {"mask": "chunk:40", **GRAIN})),
    "images": (2, Batch([[{"length": 201, "two_way": [[7, 90], [100, 180]]}], [64, 1]], GRAIN)),
    "a band": (3, Batch([[222], [9] * 4, [50]], {"mask": "band:40", **GRAIN})),
    "two and two": (4, Batch([[201], [64, 7, 1]], {"servers": 2, **GRAIN})),
    "mixed": (4, Batch([[201], [33]], {"servers": 2, "workers_serve": True, **GRAIN})),
    "balanced": (4, Batch([[400], [99, 7], [50] * 2, [64]], {"placement": "balanced", **GRAIN})),
}


@DEVICES
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("face", FACES)
def test_processes_give_the_bits_of_the_local_oracle(
    pool: RankPool, case: str, face: str, device: str
) -> None:
    ranks, batch = CASES[case]
    plan = batch.plan()
    assert plan.devices.num_ranks == ranks
    tokens = Tokens(plan, torch.float64)
    options = {"backend": "reference", "deterministic": True, "face": face}
    found = tokens.gathered(pool.run(exact, plan, tokens, device, options, ranks=ranks))
    assert_exact(found, tokens.expected(), torch.float64)
    local = on_all_ranks(plan, tokens, "reference", "steps", device)
    assert all(torch.equal(a, b) for a, b in zip(found, local, strict=True))


@settings(max_examples=20)
@given(batches(max_ranks=3), st.sampled_from(FACES), st.sampled_from((0.0, 2.0)))
def test_any_plan_over_processes(pool: RankPool, batch: Batch, face: str, softcap: float) -> None:
    plan = planned(batch)
    assume(plan is not None and plan.placement.num_documents and plan.devices.num_ranks <= 4)
    assert plan is not None
    tokens = Tokens(plan, torch.float64, softcap=softcap)
    options = {"backend": "reference", "face": face}
    found = pool.run(exact, plan, tokens, "cpu", options, ranks=plan.devices.num_ranks)
    assert_exact(tokens.gathered(found), tokens.expected(), torch.float64)


@DEVICES
@pytest.mark.parametrize("case", ["two", "spanning", "two and two"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sdpa_over_processes(pool: RankPool, case: str, dtype: torch.dtype, device: str) -> None:
    ranks, batch = CASES[case]
    plan = batch.plan()
    tokens = Tokens(plan, dtype)
    found = tokens.gathered(pool.run(exact, plan, tokens, device, {"backend": "sdpa"}, ranks=ranks))
    if dtype == torch.float32:
        assert_exact(found, tokens.expected(), dtype)
    else:
        assert max(errors(found, tokens.expected()).values()) < 1e-2


@DEVICES
def test_frozen_inputs_of_one_rank_do_not_stop_the_others(pool: RankPool, device: str) -> None:
    ranks, batch = CASES["spanning"]
    plan = batch.plan()
    tokens = Tokens(plan, torch.float64)
    wanted = [(True, True, True), (False, False, False), (False, False, True)]
    options = {"backend": "reference", "wanted": wanted}
    found = tokens.gathered(pool.run(exact, plan, tokens, device, options, ranks=ranks))
    right = tokens.expected()
    for number, wants in enumerate(wanted):
        for grad, want in zip(right[1:], wants, strict=True):
            grad[tokens.rows(number)] *= want
    assert_exact(found, right, torch.float64)


REFUSALS = {
    "plan": "disagree on the plan",
    "scale": r"disagree on the scale: 0.35\d+ on ranks 0, 2 but 0.5 on rank 1",
    "softcap": "disagree on the softcap: 0.0 on ranks 0, 2 but 30.0 on rank 1",
    "dtype": "disagree on the dtype: float32 on ranks 0, 2 but float64 on rank 1",
    "grad mode": "disagree on the grad mode",
    "shape": "where the plan places",
    "device": "does not move meta tensors",
    "serving": "the plan places 72 tokens on rank 1: it cannot only serve",
    "absence": "rank 1 did not come, while ranks 0, 2 waited in the forward first use of plan",
}


@pytest.mark.alone
@pytest.mark.parametrize("what", REFUSALS)
def test_wrong_use_is_told_on_every_rank(pool: RankPool, what: str) -> None:
    plans = [Batch([[201], [64, 7, 1], [n]], GRAIN).plan() for n in (5, 6)]
    start = time.monotonic()
    answers = pool.run(refused, plans, what, ranks=3)
    if what == "absence":
        assert answers.pop(1) == "nothing"
    for answer in answers:
        assert re.search(REFUSALS[what], answer), answer
    assert time.monotonic() - start < 20


def test_a_plan_for_another_world_is_told_on_every_rank(pool: RankPool) -> None:
    plan = Batch([[201], [64, 7, 1]], GRAIN).plan()
    tokens = Tokens(plan, torch.float32)
    answers = pool.answers(exact, plan, tokens, "cpu", {}, ranks=3)
    for error, _ in answers:
        assert error is not None
        assert "the plan is for 2 ranks but the group has 3" in error


@pytest.mark.parametrize("how", ["plain", "fsdp", "compile"])
def test_a_model_around_it(pool: RankPool, how: str) -> None:
    """Loss and weight gradients of two ranks equal those of one."""
    documents = [201, 64, 7, 1]
    alone, two = (Batch(b, GRAIN).plan() for b in ([documents], [documents[:1], documents[1:]]))
    assert len(two.forward.moved)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(sum(documents), 32, dtype=torch.float64, generator=generator)
    ((right_loss, right),) = pool.run(model_gradients, alone, x, "plain", ranks=1)
    for loss, grads in pool.run(model_gradients, two, x, how, ranks=2):
        assert loss == pytest.approx(right_loss, rel=1e-12)
        for name, grad in right.items():
            found = grads[name.removeprefix("_orig_mod.")]
            assert torch.allclose(found, grad, rtol=1e-9, atol=1e-9), name
