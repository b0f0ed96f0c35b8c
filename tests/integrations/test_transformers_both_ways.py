"""Images, prefixes, chunks and encoders of transformers: as eager attention does each document."""

from __future__ import annotations

import pytest
import torch
from integrations.tiny import assert_close
from quick import others_slow
from ranks import RankPool

pytest.importorskip("transformers", reason="transformers is not installed")

from integrations import both_ways

from distca.integrations.transformers import register, tell_two_way

MODELS = [
    "gemma3",
    "paligemma",
    "paligemma2",
    "llama4",
    "bert",
    "modernbert",
    "embeddinggemma",
    "qwen2_5_vl",
]
QUICK = {"gemma3", "llama4", "modernbert"}  # a model for each kind of mask


@pytest.mark.parametrize("name", others_slow(MODELS, QUICK))
def test_losses_and_gradients(pair: RankPool, name: str) -> None:
    losses, exact = both_ways.by_eager(name)
    for ahead in (False, True):
        answers = pair.run(both_ways.learned, name, ahead, ranks=2)
        for (loss, found), right in zip(answers, losses, strict=True):
            assert loss == pytest.approx(right, rel=1e-5)
            assert_close({key: found[key] for key in exact}, exact)


def test_ranks_without_images(pair: RankPool) -> None:
    """Each rank makes its own masks, but all make the same plans."""
    for ahead in (False, True):
        losses = [loss for loss, _ in pair.run(both_ways.learned, "gemma3", ahead, 1, ranks=2)]
        model = both_ways.model_of("gemma3", "sdpa")
        batches = [both_ways.batch_of("gemma3", rank) for rank in (0, 1)]
        del batches[1]["token_type_ids"]
        right = [both_ways.squares(model, batch).item() for batch in batches]
        assert losses == pytest.approx(right, rel=1e-5)


def test_plans_without_the_spans_of_the_mask_are_refused() -> None:
    one = register(cost="pairs")
    (batch,) = one.plan_ahead([both_ways.batch_of("gemma3", 0)])
    model = both_ways.model_of("gemma3", "distca")
    with pytest.raises(ValueError, match=r"layer 0 .* other two-way spans than the batch was"):
        model(**batch)


def test_spans_may_be_those_of_some_layers() -> None:
    """In Gemma 4 the layers with windows have them, and the others do not."""
    batch = both_ways.batch_of("gemma3", 0)
    told = tell_two_way(batch, batch["token_type_ids"] == 1, ["window:100"])
    entry = told["distca_documents"][0]
    assert entry["two_way"] == [(3, 220), (221, 226)]
    planned = register(cost="pairs").attention.local(told["distca_documents"])
    q, kv = torch.randn(509, 4, 8, dtype=torch.float64), torch.randn(509, 2, 8).double()
    attention = register(cost="pairs").attention
    plain = attention.local([500, 9])
    for mask, same in (("causal", True), ("window:100", False)):
        with_spans, without = (
            attention.attend(q, kv, kv, of, mask=mask) for of in (planned, plain)
        )
        assert torch.equal(with_spans, without) == same
