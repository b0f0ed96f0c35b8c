"""Plans with another head size of values, and with latents that are sent instead of keys."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import assume, given, settings
from planning.oracles import planned
from strategies import Batch, batches

import distca
from distca.planning.models import ModelShape, model_shape
from distca.planning.plan import Plan
from distca.planning.traffic import expansion_moves, key_moves, memory_bytes

SHAPE = ModelShape("tiny", 4, 2, 6, v_head_dim=4, latent_dim=5, rope_dim=2)
Q, OUT, KV, EXPANDED, MATRIX = 48, 32, 14, 40, 2 * 5 * 2 * (4 + 4)  # bytes


def test_bytes_of_a_token() -> None:
    assert (SHAPE.q_bytes, SHAPE.o_bytes, SHAPE.kv_bytes) == (Q, OUT, KV)
    assert (SHAPE.kv_memory_bytes, SHAPE.expansion_bytes) == (EXPANDED, MATRIX)
    assert SHAPE.flops_per_pair == 2 * 4 * (6 + 4)
    assert SHAPE.share(2).kv_bytes == KV  # every tensor-parallel rank has whole latents


@pytest.mark.parametrize(("name", "expanded"), [("deepseek-v2-lite", 5120), ("deepseek-v3", 40960)])
def test_deepseek_sends_576_elements_of_a_key(name: str, expanded: int) -> None:
    shape = model_shape(name)
    assert (shape.kv_memory_bytes, shape.kv_bytes) == (2 * expanded, 2 * 576)


@settings(max_examples=25)
@given(batches())
def test_traffic_is_that_of_every_size(batch: Batch) -> None:
    plan = planned(Batch(batch.ranks, {**batch.options, "model": SHAPE}))
    assume(plan is not None)
    assert plan is not None
    forward, backward = plan.forward, plan.backward
    for tasks, traffic, q_size, kv_size, matrix in (
        (forward, plan.traffic, Q + OUT, KV, MATRIX),
        (backward, plan.backward_traffic, 2 * Q + 2 * OUT + 4 * 4, 2 * KV, 2 * MATRIX),
    ):
        moves = key_moves(tasks, plan.placement)
        total = q_size * int(tasks.queries[tasks.moved].sum())
        total += kv_size * int((moves.stop - moves.start).sum())
        total += matrix * len(expansion_moves(tasks, plan.placement)[0])
        assert traffic.total == total
        used = memory_bytes(tasks, plan.placement, plan.shape, plan.devices.num_ranks)
        own = plan.placement.tokens * (Q + OUT + EXPANDED)
        assert (used[: len(own)] >= own).all()
    again = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert (again.fingerprint, again.shape) == (plan.fingerprint, SHAPE)


def test_sizes_are_part_of_the_fingerprint() -> None:
    sizes: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 6}
    others = ({}, {"v_head_dim": 4}, {"latent_dim": 5}, {"latent_dim": 5, "rope_dim": 2})
    plans = {distca.plan([[9], [4]], **sizes, **other).fingerprint for other in others}
    assert len(plans) == len(others)


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ({"v_head_dim": 0}, "v_head_dim = 0: it must be a whole number from 1 to 1048576"),
        ({"latent_dim": 8, "rope_dim": 6}, "latent_dim = 8 and rope_dim = 6 .* fewer than its 6"),
        ({"rope_dim": 2}, "latent_dim = 0 and rope_dim = 2 .* a latent has 1 or more elements"),
        ({"model": "deepseek-v3", "heads": None}, "model deepseek-v3 and heads are both given"),
    ],
)
def test_wrong_sizes_are_one_sentence(sizes: dict[str, Any], sentence: str) -> None:
    given: dict[str, Any] = {"heads": 4, "head_dim": 6} | sizes
    with pytest.raises(ValueError, match=sentence):
        distca.plan([[9]], **given)
