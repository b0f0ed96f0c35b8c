"""Tiny models whose attention is not causal alone, their batches, and what eager gives."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from integrations.bodies import summed
from integrations.tiny import LENGTHS, MIXED, SIZES, gradients
from torch import Tensor

from distca.integrations.transformers import register, tell_two_way

IMAGES = [[(3, 220), (221, 226), (499, 500)], [(0, 30), (33, 60)]]  # of each rank's packed tokens
VISION = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
          "num_attention_heads": 1, "image_size": 28, "patch_size": 14}  # fmt: skip


def model_of(name: str, attention: str) -> Any:
    import transformers as t

    torch.manual_seed(0)
    sizes = SIZES | {"num_hidden_layers": 3}
    vision = t.SiglipVisionConfig(**VISION, projection_dim=sizes["hidden_size"])
    parts = {"vision_config": vision, "image_token_id": sizes["vocab_size"] - 1}
    if name == "gemma3":
        text = t.Gemma3TextConfig(**sizes, sliding_window=100, layer_types=MIXED)
        config = t.Gemma3Config(text_config=text, mm_tokens_per_image=4, **parts)
        model = t.Gemma3ForConditionalGeneration(config)
    elif name.startswith("paligemma"):
        kind = t.GemmaConfig if name == "paligemma" else t.Gemma2Config
        options = {} if name == "paligemma" else {"sliding_window": 300, "layer_types": MIXED}
        config = t.PaliGemmaConfig(text_config=kind(**sizes, **options), **parts)
        model = t.PaliGemmaForConditionalGeneration(config)
    elif name == "llama4":
        chunks = ["chunked_attention", "full_attention", "chunked_attention"]
        experts = {"num_local_experts": 2, "intermediate_size_mlp": 48, "layer_types": chunks}
        model = t.Llama4ForCausalLM(t.Llama4TextConfig(**sizes, attention_chunk_size=64, **experts))
    elif name == "qwen2_5_vl":
        rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
        text = {**sizes, "rope_parameters": rope}
        vision = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 1,
                  "out_hidden_size": sizes["hidden_size"]}  # fmt: skip
        config = t.Qwen2_5_VLConfig(text_config=text, vision_config=vision)
        model = t.Qwen2_5_VLForConditionalGeneration(config)
    elif name == "modernbert":
        options = {"local_attention": 40, "layer_types": MIXED, "reference_compile": False}
        model = t.ModernBertForMaskedLM(t.ModernBertConfig(**sizes, **options))
    elif name == "embeddinggemma":
        options = {"sliding_window": 100, "layer_types": MIXED, "use_bidirectional_attention": True}
        model = t.Gemma3ForCausalLM(t.Gemma3TextConfig(**sizes, **options))
    else:
        dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        model = t.BertForMaskedLM(t.BertConfig(**sizes, **dropout))
    model.set_attn_implementation(attention)
    model.config.get_text_config().use_cache = False
    return model.train()


def batch_of(name: str, rank: int) -> dict[str, Tensor]:
    """Tokens and labels of a rank; the images of Gemma 3, or the prefixes of PaliGemma."""
    generator = torch.Generator().manual_seed(rank)
    total = sum(LENGTHS[rank])
    ids = torch.randint(1, SIZES["vocab_size"] - 1, (1, total), generator=generator)
    positions = torch.cat([torch.arange(length) for length in LENGTHS[rank]])[None]
    batch = {"input_ids": ids, "position_ids": positions}
    kinds = torch.zeros_like(ids)
    if name == "gemma3":
        for start, stop in IMAGES[rank]:
            kinds[0, start:stop] = 1
    elif name.startswith("paligemma"):
        batch["position_ids"] = positions + 1
        half = torch.cat([torch.arange(n) < n // 2 for n in LENGTHS[rank]])
        kinds[0] = (~half).long()
    elif name == "qwen2_5_vl":  # positions of text, then time, height and width of images
        batch["position_ids"] = torch.stack([positions, positions // 3, positions // 2, positions])
        return batch
    else:
        return batch
    return batch | {"token_type_ids": kinds}


def squares(model: Any, batch: dict[str, Any]) -> Tensor:
    """A loss of all tokens, without labels."""
    total: Tensor = model(**batch).logits.pow(2).sum()
    return total


def by_eager(name: str) -> tuple[list[float], dict[str, Tensor]]:
    """Returns the loss of each rank and the gradients of all, with each document by itself."""
    model = model_of(name, "eager")
    losses = []
    for rank, lengths in enumerate(LENGTHS):
        batch = batch_of(name, rank)
        parts = zip(*(rows.split(list(lengths), -1) for rows in batch.values()), strict=True)
        loss = sum(squares(model, dict(zip(batch, part, strict=True))) for part in parts)
        loss.backward()
        losses.append(loss.item())
    # The gradient by the bias of keys is zero but for rounding: it shifts all scores of a query.
    return losses, {n: g for n, g in gradients(model).items() if not n.endswith("key.bias")}


def learned(
    group: dist.ProcessGroup, name: str, ahead: bool, without: int | None = None
) -> tuple[float, dict[str, Tensor]]:
    """Returns the loss of this rank and the gradients of all.

    without: the rank that is given no token types, as one without images
    """
    registered = register(cost="pairs")
    model, rank = model_of(name, "distca"), dist.get_rank(group)
    batch = batch_of(name, rank)
    if rank == without:
        batch.pop("token_type_ids")
    if ahead:
        kinds = batch.get("token_type_ids")
        if kinds is not None:
            batch = tell_two_way(batch, kinds == (1 if name == "gemma3" else 0))
        (batch,) = registered.plan_ahead([batch])
    loss = squares(model, batch)
    loss.backward()
    return loss.item(), summed(model, group)
