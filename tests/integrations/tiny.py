"""Tiny models of transformers, packed batches, and what one process makes of them with sdpa."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

VOCAB = 61
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
}
# Class names of transformers; windows are shorter than documents, and mixed in gemma3.
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": 100}),
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {"sliding_window": 100, "layer_types": MIXED, "query_pre_attn_scalar": 12},
    ),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {}),  # scores with a cap
    "gpt_oss": ("GptOssConfig", "GptOssForCausalLM", {"num_local_experts": 2}),  # sinks
    "opt": (  # whose masks do not look at position_ids
        "OPTConfig",
        "OPTForCausalLM",
        {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
    ),
}
# By rank. The long document is moved in part, whatever the mask.
LENGTHS = ([500, 9], [33, 90, 20, 5])


def model_of(name: str, attention: str = "sdpa", **sizes: Any) -> Any:
    """The same weights on every rank."""
    import transformers

    config, model, options = MODELS[name]
    torch.manual_seed(0)
    made = getattr(transformers, model)(getattr(transformers, config)(**SIZES | options | sizes))
    made.set_attn_implementation(attention)
    made.config.use_cache = False  # with a cache, sdpa does not look where documents begin
    return made.train()


def packed(lengths: Sequence[int], seed: int = 0) -> dict[str, Tensor]:
    """Random documents in one row; the first token of each is nobody's target."""
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, VOCAB, (1, sum(lengths)), generator=draw)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    labels = torch.where(positions == 0, -100, tokens)
    return {"input_ids": tokens, "position_ids": positions, "labels": labels}


def features(lengths: Sequence[int], seed: int = 0) -> list[dict[str, list[int]]]:
    """The same documents, before a collator has them."""
    tokens = packed(lengths, seed)["input_ids"][0]
    return [{"input_ids": part.tolist()} for part in tokens.split(list(lengths))]


def batches(lengths: Iterable[Sequence[int]] = LENGTHS) -> list[dict[str, Tensor]]:
    return [packed(own, seed) for seed, own in enumerate(lengths)]


def loss_of(model: nn.Module, batch: dict[str, Any], **keywords: Any) -> Tensor:
    """Summed over targets, so that it does not matter how documents are spread over ranks."""
    loss: Tensor = model(**{"num_items_in_batch": 1} | batch | keywords).loss
    return loss


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def by_sdpa(
    name: str, all_batches: list[dict[str, Tensor]]
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses by batch, and gradients of their sum, on one process."""
    model = model_of(name)
    losses = []
    for batch in all_batches:
        loss = loss_of(model, batch)
        loss.backward()
        losses.append(loss.item())
    return losses, gradients(model)


@cache
def reference(name: str) -> tuple[list[float], dict[str, Tensor]]:
    """What ranks with ``batches()`` are compared with."""
    return by_sdpa(name, batches())


def assert_close(found: dict[str, Tensor], exact: dict[str, Tensor], error: float = 1e-5) -> None:
    assert found.keys() == exact.keys()
    for name, right in exact.items():
        assert (found[name] - right).norm() <= error * right.norm(), name
