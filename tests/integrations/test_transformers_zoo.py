"""Further families of causal models, as tiny models on one process."""

from __future__ import annotations

from typing import Any

import pytest
from integrations.tiny import SIZES, assert_close, gradients, loss_of, packed

pytest.importorskip("transformers", reason="transformers is not installed")

from distca.integrations.transformers import register

EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "apertus": {},
    "arcee": {},
    "bitnet": {},
    "cohere": {},
    "cohere2": {},
    "deepseek_v3": EXPERTS  # another head size of v
    | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
    | {"q_lora_rank": 16, "kv_lora_rank": 16, "num_key_value_heads": 4, "head_dim": 4}
    | {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8},
    "ernie4_5": {},
    "exaone4": {},
    "gemma": {},
    "glm": {},
    "glm4": {},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
    | {"resid_pdrop": 0.0},
    "gpt_neox": {},
    "granite": {},
    "helium": {},
    "ministral": {},
    "mixtral": {"num_local_experts": 4},
    "olmo2": {},
    "olmo3": {},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "phi": {},
    "phi3": {},
    "qwen2": {},
    "qwen3_moe": EXPERTS | {"num_experts": 4},
    "seed_oss": {},
    "smollm3": {},
    "stablelm": {},
    "starcoder2": {},
}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_losses_and_gradients_of_sdpa(family: str) -> None:
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    register(cost="pairs")
    config, sizes = CONFIG_MAPPING[family], SIZES | {"sliding_window": 20}
    known = {name: value for name, value in sizes.items() if hasattr(config(), name)}
    no_dropout = {"attention_dropout": 0.0, "residual_dropout": 0.0, "use_cache": False}
    batch = packed([70, 5, 1, 33])
    found = {}
    for attention in ("sdpa", "distca"):
        torch.manual_seed(0)
        made = config(**known | no_dropout | FAMILIES[family])
        model = AutoModelForCausalLM.from_config(made, attn_implementation=attention)
        loss = loss_of(model.train(), batch)
        loss.backward()
        # A bias of keys shifts all scores of a query equally: its gradient is zero up to rounding.
        grads = {n: g for n, g in gradients(model).items() if not n.endswith("k_proj.bias")}
        found[attention] = loss.item(), grads
    assert found["distca"][0] == pytest.approx(found["sdpa"][0], rel=1e-5)
    assert_close(found["distca"][1], found["sdpa"][1])
