"""Tiny models of transformers, packed batches, and the results of sdpa on one process."""

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
# Classes of transformers. Windows are shorter than documents; gemma3 has layers with and without.
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
    "gemma2": (  # caps its scores, which are made large enough for that to matter
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {
            "sliding_window": 100,
            "layer_types": MIXED,
            "query_pre_attn_scalar": 1,
            "initializer_range": 0.2,
            "attn_logit_softcapping": 0.7,
        },
    ),
    "gpt_oss": (  # has attention sinks
        "GptOssConfig",
        "GptOssForCausalLM",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "initializer_range": 0.2,
            "sliding_window": 100,
            "layer_types": MIXED,
        },
    ),
    "opt": (  # its masks ignore position_ids
        "OPTConfig",
        "OPTForCausalLM",
        {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
    ),
}
NOT_BY_SDPA = ("gemma2", "gpt_oss")  # these are compared with their own eager attention
# Documents of each rank. Parts of the long document are moved with any mask.
LENGTHS = ([500, 9], [33, 90, 20, 5])


def model_of(name: str, attention: str = "sdpa", **sizes: Any) -> Any:
    """Returns a model with the same weights on every rank."""
    import transformers

    config, model, options = MODELS[name]
    torch.manual_seed(0)
    made = getattr(transformers, model)(getattr(transformers, config)(**SIZES | options | sizes))
    made.set_attn_implementation(attention)
    made.config.use_cache = False  # with a cache, sdpa ignores where documents begin
    return made.train()


def packed(lengths: Sequence[int], seed: int = 0) -> dict[str, Tensor]:
    """Returns random documents in one row; the first token of each is not a target."""
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, VOCAB, (1, sum(lengths)), generator=draw)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    labels = torch.where(positions == 0, -100, tokens)
    return {"input_ids": tokens, "position_ids": positions, "labels": labels}


def features(lengths: Sequence[int], seed: int = 0) -> list[dict[str, list[int]]]:
    """Returns the same documents in the form that collators take."""
    tokens = packed(lengths, seed)["input_ids"][0]
    return [{"input_ids": part.tolist()} for part in tokens.split(list(lengths))]


def batches(lengths: Iterable[Sequence[int]] = LENGTHS) -> list[dict[str, Tensor]]:
    return [packed(own, seed) for seed, own in enumerate(lengths)]


def loss_of(model: nn.Module, batch: dict[str, Any], **keywords: Any) -> Tensor:
    """Returns the sum over targets, which does not depend on the distribution over ranks."""
    loss: Tensor = model(**{"num_items_in_batch": 1} | batch | keywords).loss
    return loss


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def by_sdpa(
    name: str, all_batches: list[dict[str, Tensor]]
) -> tuple[list[float], dict[str, Tensor]]:
    """Returns the loss of each batch, and the gradients of their sum, on one process."""
    model = model_of(name)
    losses = []
    for batch in all_batches:
        loss = loss_of(model, batch)
        loss.backward()
        losses.append(loss.item())
    return losses, gradients(model)


def by_eager(
    name: str, lengths: Iterable[Sequence[int]] = LENGTHS, **sizes: Any
) -> tuple[list[float], dict[str, Tensor]]:
    """Returns the same by eager attention, which is given each document by itself."""
    model = model_of(name, "eager", **sizes)
    losses = []
    for own, batch in zip(lengths, batches(lengths), strict=True):
        parts = zip(*(rows.split(list(own), 1) for rows in batch.values()), strict=True)
        documents = [dict(zip(batch, part, strict=True)) for part in parts]
        loss = torch.stack([loss_of(model, document) for document in documents]).sum()
        loss.backward()
        losses.append(loss.item())
    return losses, gradients(model)


@cache
def reference(name: str) -> tuple[list[float], dict[str, Tensor]]:
    """Returns the reference for ranks with ``batches()``."""
    return by_eager(name) if name in NOT_BY_SDPA else by_sdpa(name, batches())


def assert_close(found: dict[str, Tensor], exact: dict[str, Tensor], error: float = 1e-5) -> None:
    assert found.keys() == exact.keys()
    for name, right in exact.items():
        assert (found[name] - right).norm() <= error * right.norm(), name
