"""Every exchange is checked, not only a plan's first: a mistake is one sentence on every rank."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import pytest
import torch
from attention import mismatches
from attention.bodies import FACES
from attention.mismatches import Ranks
from attention.tokens import Tokens
from ranks import RankPool
from strategies import Batch

GRAIN = {"tile": 16, "min_shard": 16, "cost": "pairs"}
ORDER = "run the same layers in the same order on every rank, and serve as many of them"
SENTENCES: dict[Callable[[Ranks], None], str] = {
    mismatches.plan: r"the plan: \w{12} on rank 0 but \w{12} on rank 1; make it from the same",
    mismatches.new_plan: "the message: dispatch on rank 0 but first use on rank 1; .* new on all",
    mismatches.plan_in_backward: r"the plan: \w{12} on rank 0 but \w{12} on rank 1; make it",
    mismatches.backward_order: "the backward order: 0 on rank 0 but 1 on rank 1; run the backward",
    mismatches.dtype: "the dtype: float64 on rank 0 but float32 on rank 1",
    mismatches.heads: "the heads: 4 on rank 0 but 8 on rank 1",
    mismatches.head_dim: "the head dim: 8 on rank 0 but 16 on rank 1",
    mismatches.grad_mode: "the grad mode: True on rank 0 but False on rank 1; enter",
    mismatches.sinks: "the sinks: False on rank 0 but True on rank 1; give sinks to the same",
    mismatches.shape_of_sinks: r"sinks have shape \(3,\), but q has 4 heads: give one per head",
    mismatches.shape: "where the plan places",
    mismatches.layers: f"the direction: forward on rank 0 but backward on rank 1; {ORDER}",
    mismatches.half: f"the attention: .* on rank 0 but .* on rank 1; {ORDER}",
}


def plans_of_equal_sizes() -> list:
    """Plans that move equally many rows of other documents, so that no size tells them apart."""
    plans = [Batch([documents, [8]], GRAIN).plan() for documents in ([120, 80], [80, 120])]
    assert plans[0].fingerprint != plans[1].fingerprint
    for name in ("traffic", "backward_traffic"):
        a, b = (getattr(plan, name) for plan in plans)
        assert (a.send == b.send).all()
        assert (a.recv == b.recv).all()
    return plans


def plans_of_other_sizes() -> list:
    return [Batch([[length], [8]], GRAIN).plan() for length in (200, 300)]


def assert_right_after(answers: list, plans: list) -> None:
    """The ranks go on: nothing was sent that would be taken for something else."""
    for number, plan in enumerate(plans):
        tokens = Tokens(plan, torch.float64)
        tokens.grad_out = torch.ones_like(tokens.grad_out)
        for at, right in enumerate(tokens.expected()[:2]):
            found = torch.cat([after[2 * number + at] for _, after in answers])
            assert torch.allclose(found, right), (number, at)


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("what", SENTENCES, ids=lambda what: what.__name__)
def test_a_rank_that_does_something_else_is_told_on_every_rank(
    pool: RankPool, what: Callable[[Ranks], None], face: str
) -> None:
    plans = plans_of_equal_sizes()
    start = time.monotonic()
    answers = pool.run(mismatches.told, plans, what, face, ranks=2)
    assert time.monotonic() - start < 15
    for error, _ in answers:
        assert error.startswith("DisagreementError: ")
        assert re.search(SENTENCES[what], error), error
    assert_right_after(answers, plans)


@pytest.mark.parametrize("face", FACES)
def test_what_is_no_tensor_is_told_on_every_rank(pool: RankPool, face: str) -> None:
    plans, words = plans_of_other_sizes(), "q is a list: give a dense tensor"
    answers = pool.run(mismatches.told, plans, mismatches.no_tensor, face, ranks=2)
    assert [error for error, _ in answers] == [
        f"DisagreementError: rank 1 cannot take part: {words}",
        f"DisagreementError: {words}",
    ]
    assert_right_after(answers, plans)


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("what", [mismatches.plan, mismatches.plan_in_backward])
def test_sizes_that_disagree_abort_nothing(
    pool: RankPool, what: Callable[[Ranks], None], face: str
) -> None:
    plans = plans_of_other_sizes()
    answers = pool.run(mismatches.told, plans, what, face, ranks=2)
    for error, _ in answers:
        assert "disagree on the plan" in error
    assert_right_after(answers, plans)


def test_ping_and_pong_in_another_order_are_told(pool: RankPool) -> None:
    for error, _ in pool.run(
        mismatches.told, plans_of_equal_sizes(), mismatches.order, "async", ranks=2
    ):
        assert re.search("disagree on the (attention|message): ", error), error
        assert ORDER in error


@pytest.mark.parametrize(
    ("what", "ranks", "sentence"),
    [
        (
            mismatches.absence,
            2,
            r"rank 1 did not come, while rank 0 waited in the forward dispatch",
        ),
        (
            mismatches.absence_in_backward,
            4,
            "rank 1 did not come, while ranks 0, 2, 3 waited in the backward dispatch of plan",
        ),
    ],
)
@pytest.mark.alone
def test_a_rank_that_does_not_come_is_named_in_time(
    pool: RankPool, what: Callable[[Ranks], None], ranks: int, sentence: str
) -> None:
    plans = [Batch([[length], *[[8]] * (ranks - 1)], GRAIN).plan() for length in (200, 300)]
    start = time.monotonic()
    answers = pool.run(mismatches.told, plans, what, "op", ranks=ranks)
    assert time.monotonic() - start < 15  # the timeout of the group is 3 s
    assert answers.pop(1)[0] == "nothing"
    for error, _ in answers:
        assert re.search(f"^ExchangeError: {sentence}", error), error
        assert error.endswith(": no word for 3 s, look at what it does or set a longer timeout")


@pytest.mark.parametrize(
    ("layers", "backward", "sentence"),
    [
        (1, 1, "the direction: forward on ranks 0, 1 but backward on rank 2"),
        (3, 2, "the direction: backward on ranks 0, 1 but forward on rank 2"),
        (2, 1, "the direction: backward on ranks 0, 1 but forward on rank 2"),
        (1, 0, "the grad mode: True on ranks 0, 1 but False on rank 2"),
    ],
)
def test_a_server_of_another_number_of_layers_is_told(
    pool: RankPool, layers: int, backward: int, sentence: str
) -> None:
    plan = Batch([[200], [64, 7]], GRAIN).plan(servers=1)
    for error in pool.run(mismatches.served, plan, layers, backward, ranks=3):
        assert f"disagree on {sentence}" in error
        assert error.startswith("DisagreementError: ")


@pytest.mark.parametrize("face", FACES)
def test_the_backward_order_is_compared_where_a_rank_has_no_tokens(
    pool: RankPool, face: str
) -> None:
    """It runs the backward passes of its empty tensors in an order of its own, too."""
    plans = [Batch([[length], [8], []], GRAIN).plan() for length in (200, 300)]
    for error, _ in pool.run(mismatches.told, plans, mismatches.backward_order, face, ranks=3):
        assert "disagree on the backward order: 0 on ranks 0, 2 but 1 on rank 1" in error
