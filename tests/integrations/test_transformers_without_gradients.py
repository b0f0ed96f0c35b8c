"""Without gradients, too, packed documents are kept apart or refused; padded rows are computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from integrations.tiny import loss_of, model_of, packed

pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import DynamicCache, StaticCache

from distca.integrations.transformers import register


@pytest.fixture(autouse=True)
def _registered() -> None:
    register(cost="pairs")


PADDED = torch.tensor([1] * 19 + [0] * 2)[None]
ENDS = torch.tensor([0, 9, 14, 15, 21], dtype=torch.int32)
NOT_KEPT_APART: dict[str, tuple[Callable[[Any], dict[str, Any]], str]] = {
    "padding": (lambda _: {"attention_mask": PADDED}, "is given padding"),
    "padding and lengths": (
        lambda _: {"attention_mask": PADDED, "cu_seq_lens_q": ENDS, "cu_seq_lens_k": ENDS},
        "is given padding",
    ),
    "lengths that do not fit": (
        lambda _: {"attention_mask": PADDED, "cu_seq_lens_q": ENDS[:-1]},
        "is given padding",
    ),
    "a static cache": (
        lambda config: {"past_key_values": StaticCache(config=config, max_cache_len=64)},
        "64 keys for 21 queries: .*none with several documents",
    ),
    "a static cache and ones": (
        lambda config: {
            "past_key_values": StaticCache(config=config, max_cache_len=64),
            "attention_mask": torch.ones_like(PADDED),
        },
        "64 keys for 21 queries",
    ),
}


@pytest.mark.parametrize("way", NOT_KEPT_APART)
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss"])
def test_packed_documents_are_not_mixed_without_gradients(name: str, way: str) -> None:
    model = model_of(name, "distca").eval()
    given, words = NOT_KEPT_APART[way]
    batch = packed([9, 5, 1, 6])
    with torch.no_grad(), pytest.raises(ValueError, match=rf"layer 0 .*{words}"):
        model(**batch | given(model.config))


def test_packed_documents_behind_a_filled_cache() -> None:
    model, batch = model_of("llama", "distca").eval(), packed([9, 5, 1, 6])
    tokens, positions = batch["input_ids"], batch["position_ids"]
    with torch.no_grad():
        filled = model(tokens[:, :9], use_cache=True).past_key_values
        with pytest.raises(ValueError, match=r"layer 0 .*21 keys for 12 queries: .*several"):
            model(tokens[:, 9:], position_ids=positions[:, 9:], past_key_values=filled)


def test_no_masks_at_all_for_packed_documents() -> None:
    model, batch = model_of("qwen3", "distca").eval(), packed([9, 5])
    nothing = {"attention_mask": {"full_attention": None}}
    with torch.no_grad(), pytest.raises(ValueError, match=r"layer 0 .*is given no mask"):
        model(**batch | nothing)
    with torch.no_grad():
        right, found = (loss_of(model, packed([14]) | given) for given in ({}, nothing))
    torch.testing.assert_close(found, right)


def test_a_mask_of_the_users_own_is_all_that_counts_without_gradients() -> None:
    batch = packed([9, 5])
    batch["attention_mask"] = torch.ones(1, 1, 14, 14, dtype=torch.bool).tril()
    added = torch.where(batch["attention_mask"], 0.0, torch.finfo(torch.float32).min)
    with torch.no_grad():
        found = model_of("llama", "distca")(**batch).logits
        right = model_of("llama", "eager")(**batch | {"attention_mask": added}).logits
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("padding", [[0] * 3 + [1] * 11, [1] * 4 + [0] * 2 + [1] * 8])
@pytest.mark.parametrize("static", [False, True])
def test_positions_of_padding_are_no_documents(padding: list[int], static: bool) -> None:
    """As in ``generate``: positions are 1, 1, 1, 0, 1, ..., and go on behind padding."""
    mask, tokens = torch.tensor([padding]), packed([14])["input_ids"]
    positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)
    logits = []
    for one in ("eager", "distca"):
        model = model_of("llama", one).eval()
        cache = DynamicCache()
        if static:
            cache = StaticCache(config=model.config, max_cache_len=32)
        given = {"past_key_values": cache, "use_cache": True}
        with torch.no_grad():
            parts = [
                model(
                    tokens[:, start:stop],
                    attention_mask=mask[:, :stop],
                    position_ids=positions[:, start:stop],
                    **given,
                ).logits
                for start, stop in ((0, 7), (7, 14))
            ]
        logits.append(torch.cat(parts, 1)[mask == 1])
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("options", [{"cache_implementation": "static"}, {"num_beams": 2}])
def test_generation_from_padded_prompts(name: str, options: dict[str, Any]) -> None:
    prompts = packed([24])["input_ids"].view(2, 12)
    mask = torch.tensor([[1] * 12, [0] * 5 + [1] * 7])
    options = {"max_new_tokens": 5, "do_sample": False, "disable_compile": True} | options
    found, right = (
        model_of(name, one).eval().generate(prompts, attention_mask=mask, **options)
        for one in ("distca", "eager")
    )
    assert torch.equal(found, right)
