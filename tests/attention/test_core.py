"""CoreAttention in autograd: gradients, checkpointing, lifetime, wrong use."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from attention.tokens import EXACT, SCALE, Tokens
from strategies import Batch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from distca.attention import core
from distca.attention.core import CoreAttention
from distca.dispatch.transport import LocalHub, LocalTransport, Promise
from distca.planning.plan import Plan


class Counting:
    """A transport that counts its exchanges."""

    def __init__(self, inner: LocalTransport) -> None:
        self.inner, self.rank, self.num_ranks, self.exchanges = (
            inner,
            inner.rank,
            inner.num_ranks,
            0,
        )

    def start(self, send: Tensor, send_bytes: Sequence[int], recv_bytes: Sequence[int]) -> Promise:
        self.exchanges += 1
        return self.inner.start(send, send_bytes, recv_bytes)


def three_ranks() -> Plan:
    return Batch([[301], [64, 7, 1], []], {"tile": 16, "min_shard": 16}).plan()


def leaves(tokens: Tokens, rank: int) -> list[Tensor]:
    rows = tokens.rows(rank)
    return [t[rows].clone().requires_grad_() for t in (tokens.q, tokens.k, tokens.v)]


def test_gradients_are_those_of_one_device() -> None:
    plan = three_ranks()
    tokens = Tokens(plan, torch.float64)

    def rank(transport: LocalTransport) -> list[Tensor]:
        attend = CoreAttention(transport=transport, backend="reference", scale=SCALE)
        inputs = leaves(tokens, transport.rank)
        out = attend(*inputs, plan)
        out.backward(tokens.grad_out[tokens.rows(transport.rank)])
        return [out.detach(), *(t.grad for t in inputs if t.grad is not None)]

    results = LocalHub(3).run(rank)
    for index, exact in enumerate(tokens.expected()):
        for number, result in enumerate(results):
            mine = exact[tokens.rows(number)]
            error = (result[index] - mine).norm() / mine.norm().clamp_min(1.0)
            assert error <= EXACT[torch.float64]


def test_selective_checkpointing_exchanges_once() -> None:
    plan = three_ranks()
    tokens = Tokens(plan, torch.float64)
    saved = partial(create_selective_checkpoint_contexts, [torch.ops.distca.core_attention.default])

    def rank(transport: LocalTransport) -> int:
        counting = Counting(transport)
        attend = CoreAttention(transport=counting, backend="reference")

        def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(q * 2, k * 2, v * 2, plan).sin()

        inputs = leaves(tokens, transport.rank)
        checkpoint(layer, *inputs, use_reentrant=False, context_fn=saved).sum().backward()
        return counting.exchanges

    assert LocalHub(3).run(rank) == [4, 4, 4]  # out and back, forward and backward


def test_an_exchange_lives_until_its_last_backward() -> None:
    plan = Batch([[40, 3]], {"tile": 16, "min_shard": 16}).plan()
    tokens = Tokens(plan, torch.float64)
    before = len(core._EXCHANGES)

    def rank(transport: LocalTransport) -> None:
        inputs = leaves(tokens, 0)
        out = CoreAttention(transport=transport)(*inputs, plan)
        gc.collect()
        assert len(core._EXCHANGES) == before + 1  # the graph holds it, the module is gone
        out.sum().backward()
        assert inputs[0].grad is not None

    LocalHub(1).run(rank)
    gc.collect()
    assert len(core._EXCHANGES) == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda q, k, v: (q[1:], k, v),
            r"q has shape .* on rank 0, where the plan places 43 tokens",
        ),
        (lambda q, k, v: (q, k.float(), v), "k is torch.float32 on cpu but q is torch.float64"),
        (lambda q, k, v: (q, k[:, :1], v), "k and v must agree"),
        (lambda q, k, v: (q[:, :3], k, v), "multiple of their heads"),
    ],
)
def test_tensors_that_do_not_match_are_refused(change, message: str) -> None:  # type: ignore[no-untyped-def]
    plan = Batch([[40, 3]]).plan()
    inputs = change(*leaves(Tokens(plan, torch.float64), 0))
    with pytest.raises(ValueError, match=message):
        CoreAttention(transport=LocalTransport(LocalHub(1), 0))(*inputs, plan)


def test_a_plan_for_other_ranks_is_refused() -> None:
    plan = three_ranks()
    inputs = leaves(Tokens(plan, torch.float64), 0)
    with pytest.raises(ValueError, match="the plan is for 3 ranks but the group has 2"):
        CoreAttention(transport=LocalTransport(LocalHub(2), 0))(*inputs, plan)
