"""Megatron-Core's models and schedules on gloo, compared with its own local attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ranks import RankPool

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from integrations import megatron_bodies as bodies
from integrations import megatron_refusals as refusals
from integrations.megatron_bodies import Case

from distca.integrations.megatron.attention import mask_of_window
from distca.integrations.megatron.batches import head_and_tail, lengths_of, lengths_of_mask
from distca.planning.masks import CAUSAL, Mask

ROWS = [[[96, 96], [96, 96]], [[96, 96], [96, 96]]]
TWO_ROWS = [[[40, 56, 96], [96, 96]], [[96, 8, 88], [10, 20, 30, 36, 96]]]
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
SINKS, OFF_BY_ONE = ({"softmax_type": name} for name in ("learnable", "off-by-one"))
WINDOWS = {"window_size": (19, 0), "window_attn_skip_freq": 2}
TOLERANCE = 5e-6


@pytest.fixture(scope="module")
def two() -> Iterator[RankPool]:
    """Two ranks that only these tests use: Megatron's many groups leave threads behind."""
    pool = RankPool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def four() -> Iterator[RankPool]:
    pool = RankPool(4)
    yield pool
    pool.close()


@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(ahead=True),
        Case(ours=FULL),
        Case(ours=SELECTIVE, ahead=True),
        Case(form="sbhd"),
        Case(form="sbhd", num_rows=2, lengths=TWO_ROWS),
        Case(config=WINDOWS),
        Case(config=SINKS | WINDOWS, ours=SELECTIVE),
        Case(config=OFF_BY_ONE, form="sbhd"),
    ],
    ids=[
        "packed",
        "ahead",
        "full-recompute",
        "core-recompute",
        "documents-in-a-row",
        "documents-in-rows",
        "windows",
        "sinks-windows",
        "off-by-one",
    ],
)
def test_data_parallel(two: RankPool, case: Case) -> None:
    assert max(two.run(bodies.stepped, case, ranks=2)) < TOLERANCE


@pytest.mark.parametrize(
    "case",
    [Case(form="rows", lengths=ROWS), Case(form="mask"), Case(pp=2), Case(form="mask", pp=2)],
    ids=["rows", "masks", "one-pipeline", "one-pipeline-masks"],
)
def test_nothing_moves_where_there_is_nothing_to_gain(two: RankPool, case: Case) -> None:
    assert max(two.run(bodies.stepped, case, False, ranks=2)) < TOLERANCE


@pytest.mark.parametrize(
    "case",
    [
        Case(pp=2),
        Case(pp=2, ours=FULL, ahead=True),
        pytest.param(
            Case(pp=2, chunks=2, ours=FULL | {"overlap_p2p_comm": True, "batch_p2p_comm": False}),
            marks=pytest.mark.slow,
        ),
        Case(tp=2),
        pytest.param(Case(tp=2, config=SINKS), marks=pytest.mark.slow),
        pytest.param(Case(cp=2), marks=pytest.mark.slow),
        Case(cp=2, form="rows", lengths=ROWS),
        Case(cp=2, pp=2, config=WINDOWS, ours=SELECTIVE),
    ],
    ids=[
        "pipelines",
        "pipelines-recompute",
        "interleaved-recompute",
        "tensor",
        "tensor-sinks",
        "context",
        "context-rows",
        "context-pipeline-windows",
    ],
)
def test_with_other_parallelism(four: RankPool, case: Case) -> None:
    assert max(four.run(bodies.stepped, case, ranks=4)) < TOLERANCE


@pytest.mark.parametrize("form", ["thd", "mask"])
def test_evaluation_is_local(two: RankPool, form: str) -> None:
    assert max(two.run(refusals.evaluated, form, ranks=2)) < TOLERANCE


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("offsets", "documents of 150 tokens, but tensors of 192"),
        ("none", "PackedSeqParams without cu_seqlens_q"),
        ("rows", "a document continues in the next row of 96 tokens"),
        ("reused", "is given the PackedSeqParams of an earlier forward pass"),
    ],
)
def test_an_error_on_one_rank_is_raised_on_all(two: RankPool, what: str, words: str) -> None:
    first, second = two.run(refusals.said, what, ranks=2)
    assert second.startswith("layer 1 (DistcaDotProductAttention)")
    assert words in second
    assert first == f"rank 1 cannot take part: {second}"


def test_sinks_in_checkpoints(two: RankPool) -> None:
    for ours, megatrons in two.run(refusals.sharded_sinks, ranks=2):
        assert ours == megatrons


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"attention_dropout": 0.1},
        "uses attention dropout (0.1), which distca does not support: set",
    ),
    ({"window_size": (8, 2)}, "has window_size (8, 2), which includes later keys"),
    ({"qk_clip": True}, "needs the attention logits (qk_clip)"),
    ({"attn_mask_type": "no_mask"}, "has attn_mask_type no_mask, not causal"),
    ({"bias": True}, "adds a bias to its scores"),
    ({"cache": True}, "is given 1 queries for 8 keys, as with a cache"),
    ({"called": "padding"}, "is called with attn_mask_type padding, not causal"),
    ({"mask": "later"}, "is given a mask that is not of causal documents: leave it out"),
    ({"mask": "holes"}, "is given a mask that is not of causal documents: leave it out"),
]


def test_refusals(two: RankPool) -> None:
    for answers in two.run(refusals.refused, [changes for changes, _ in REFUSED], ranks=2):
        for said, (_, words) in zip(answers, REFUSED, strict=True):
            assert said.startswith("layer 1 (DistcaDotProductAttention) ")
            assert words in said


@pytest.mark.parametrize(
    ("case", "node"), [(Case(tp=2), [0, 1]), (Case(pp=2), [0, 0])], ids=["tensor", "pipeline"]
)
def test_plan_options(four: RankPool, case: Case, node: list[int]) -> None:
    """The nodes are those of a data-parallel group, whose ranks tensor parallelism spreads."""
    limits = {"speed": [1.0, 0.5], "memory_bytes": 1 << 20}
    for devices in four.run(refusals.devices_of, case, limits, ranks=4):
        assert devices == [{"node": node, "speed": [1.0, 0.5], "memory_bytes": [1 << 20] * 2}]


@pytest.mark.parametrize(
    ("window", "reach"),
    [((-1, 0), CAUSAL), ((-1, -1), CAUSAL), ((8, 0), 9), ((8, -1), 9), ((0, 0), 1)],
)
def test_windows_of_causal_layers(window: tuple[int, int], reach: int) -> None:
    """-1 is infinite, as in Transformer Engine, and the layer stays causal."""
    assert mask_of_window(window, "layer 1") == Mask(reach)


def test_documents() -> None:
    packed = bodies.packed_of([3, 1, 4])
    assert lengths_of(packed) == [3, 1, 4]
    packed.cu_seqlens_q_padded = packed.cu_seqlens_kv_padded = torch.tensor([0, 4, 8, 12])
    assert lengths_of(packed) == [4, 4, 4]
    packed.cu_seqlens_kv_padded = torch.tensor([0, 4, 6, 12])
    with pytest.raises(ValueError, match="cu_seqlens_q and cu_seqlens_kv differ"):
        lengths_of(packed)
    masks = torch.cat([bodies.mask_of([3, 1, 4]), bodies.mask_of([8])])
    assert lengths_of_mask(masks, 2) == [3, 1, 4, 8]
    assert lengths_of_mask(masks[1:], 3) == [8, 8, 8]


def test_head_and_tail() -> None:
    def spans(rank: int) -> list[tuple[int, int]]:
        shards: list[Any] = head_and_tail([8, 4], rank, 2, 0)
        return [(shard["start"], shard["stop"]) for shard in shards]

    assert spans(0) == [(0, 2), (6, 8), (0, 1), (3, 4)]
    assert spans(1) == [(2, 4), (4, 6), (1, 2), (2, 3)]
    with pytest.raises(ValueError, match="document 1 has 6 tokens"):
        head_and_tail([8, 6], 0, 2, 0)
