"""Tiny models with latent attention, and what ranks that share their attention learn with them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from integrations.bodies import summed
from integrations.tiny import LENGTHS, SIZES, gradients, packed
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from distca.attention.core import CoreAttention
from distca.integrations.transformers import register

MLA = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
    "q_lora_rank": 16,
    "first_k_dense_replace": 3,
}
MODELS = {"deepseek_v2": "DeepseekV2", "deepseek_v3": "DeepseekV3"}


def model_of(name: str, attention: str) -> Any:
    import transformers as t

    torch.manual_seed(0)
    sizes = {key: size for key, size in SIZES.items() if key != "head_dim"} | MLA
    kind = MODELS[name]
    model = getattr(t, f"{kind}ForCausalLM")(getattr(t, f"{kind}Config")(**sizes))
    model.set_attn_implementation(attention)
    model.config.use_cache = False
    return model.train()


def squares(model: Any, batch: dict[str, Any]) -> Tensor:
    total: Tensor = model(**batch).logits.pow(2).sum()
    return total


def by_eager(name: str) -> tuple[list[float], dict[str, Tensor]]:
    """Returns the loss of each rank and the gradients of all, with each document by itself."""
    model, losses = model_of(name, "eager"), []
    for rank, lengths in enumerate(LENGTHS):
        rows = tokens_of(rank)["input_ids"].split(list(lengths), 1)
        loss = sum(squares(model, {"input_ids": row}) for row in rows)
        loss.backward()
        losses.append(loss.item())
    return losses, gradients(model)


def tokens_of(rank: int) -> dict[str, Tensor]:
    batch = packed(LENGTHS[rank], rank)
    return {name: batch[name] for name in ("input_ids", "position_ids")}


def learned(
    group: dist.ProcessGroup, name: str, how: str
) -> tuple[float, dict[str, Tensor], list[bool]]:
    """Returns the loss of this rank, the gradients of all, and which layers sent latents."""
    sent: list[bool] = []

    class Watched(CoreAttention):
        def __call__(self, *args: Any, **options: Any) -> Tensor:
            sent.append(options["latent"] is not None)
            return super().__call__(*args, **options)

    from distca.integrations.shared import planned

    planned.CoreAttention = Watched  # type: ignore[misc]
    try:
        register(cost="pairs", latents=how != "expanded")
        model = model_of(name, "distca")
        if how == "checkpointed":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if how == "biased":  # no plain matrix: keys and values travel
            for layer in model.model.layers:
                bias = torch.zeros(layer.self_attn.kv_b_proj.out_features)
                layer.self_attn.kv_b_proj.bias = torch.nn.Parameter(bias, requires_grad=False)
        if how == "fsdp":
            for part in (*model.model.layers, model):
                fully_shard(part)
                part.set_gradient_divide_factor(1.0)
                part.set_force_sum_reduction_for_comms(True)
        loss = squares(model, tokens_of(dist.get_rank(group)))
        loss.backward()
    finally:
        planned.CoreAttention = CoreAttention  # type: ignore[misc]
    if how == "fsdp":
        grads = {n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None}
        return loss.item(), grads, sent
    return loss.item(), summed(model, group), sent
