"""Models with experts, states and images: trained on two ranks as with their own attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import RankPool

pytest.importorskip("transformers", reason="transformers is not installed")

from integrations import whole_models
from integrations.family_models import model_of
from integrations.tiny import packed

from distca.integrations.transformers import collate_shared, register, states

# Experts, two kinds of Mamba with attention, linear attention with experts, and images.
MODELS = ["qwen3_moe", "bamba", "falcon_h1", "qwen3_next", "gemma3"]
SHORT = ["qwen3_moe", "bamba"]


def check(pair: RankPool, name: str, steps: int, ahead: bool) -> None:
    losses, choices = whole_models.by_eager(name, steps)
    found = pair.run(whole_models.trained, name, steps, choices, ahead, ranks=2)
    for rank in (0, 1):
        assert found[rank] == pytest.approx(losses[rank], rel=1e-5)
        assert losses[rank][(steps - 1) // 2 * 2] < losses[rank][0]  # of the same documents


@pytest.mark.parametrize("name", SHORT)
def test_some_steps(pair: RankPool, name: str) -> None:
    check(pair, name, 3, ahead=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_twenty_steps(pair: RankPool, name: str) -> None:
    check(pair, name, 20, ahead=name != "gemma3")


@pytest.mark.parametrize("lengths", [(5,), (1, 1, 1), (40, 3, 4, 9, 1, 17)])
def test_documents_as_rows(lengths: tuple[int, ...]) -> None:
    groups, places = states.rows_of(lengths, torch.device("cpu"))
    own = torch.cat([rows.tokens[rows.is_own] for rows in groups])
    assert own[places].tolist() == list(range(sum(lengths)))
    assert sum(len(rows.tokens) for rows in groups) == len(lengths)
    assert sum(rows.tokens.numel() for rows in groups) < 2 * sum(lengths)


@pytest.mark.parametrize("reentrant", [True, False])
def test_layers_with_a_state_are_recomputed(reentrant: bool) -> None:
    """Each of two forward passes before the backward passes has its own documents."""
    register(cost="pairs")
    answers: list[Any] = []
    for checkpointing in (False, True):
        model = model_of("lfm2", "distca")
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        losses = [model(**packed(one), use_cache=False).loss for one in ([20, 9], [4, 25])]
        sum(losses).backward()
        answers.append([parameter.grad for parameter in model.parameters()])
    for right, found in zip(*answers, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-6)


def test_other_recomputations_are_refused() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    register(cost="pairs")
    model = model_of("lfm2", "distca")
    model.model.layers[0] = checkpoint_wrapper(model.model.layers[0])
    loss = model(**packed([20, 9]), use_cache=False).loss
    with pytest.raises(ValueError, match=r"Lfm2ShortConv is recomputed .*checkpointing_enable"):
        loss.backward()


def test_other_attention_computes_as_ever() -> None:
    """Its states pass from document to document, as without distca."""
    register(cost="pairs")
    batch, model = packed([20, 9]), model_of("lfm2", "eager")
    before = model(**batch, use_cache=False).logits
    model_of("lfm2", "distca")(**batch, use_cache=False)
    assert torch.equal(model(**batch, use_cache=False).logits, before)


def test_states_cannot_be_shared_as_a_prefix() -> None:
    register(cost="pairs")
    rows = [{"input_ids": [1, 2, 3, 4, end], "labels": [-100] * 4 + [end]} for end in (5, 6)]
    with pytest.raises(ValueError, match=r"layer 1 .*carries a state, which documents cannot"):
        model_of("lfm2", "distca")(**collate_shared(rows))
