"""Tiny models of all families of the installed transformers, with random weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

VOCAB = 61
MOST_PARAMETERS = 30_000_000

# What makes a config small, by the name of an entry; a name may stand for several families.
SMALL: dict[str, Any] = (
    dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "dim_model", "emb_dim", "n_embed"),
        32,
    )
    | dict.fromkeys(("word_embed_proj_dim", "embedding_size", "input_dim", "lru_width"), 32)
    | dict.fromkeys(("hidden_dim", "hidden_dims", "attention_hidden_size", "projection_dim"), 32)
    | dict.fromkeys(("vision_hidden_size", "audio_hidden_size", "out_hidden_size"), 32)
    | dict.fromkeys(("intermediate_size", "ffn_dim", "dim_ff", "ffn_hidden_size", "n_inner"), 48)
    | dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim", "dff", "d_inner", "d_ff"), 48)
    | dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16)
    | dict.fromkeys(("expert_ffn_hidden_size", "intermediate_size_mlp", "feed_forward_size"), 48)
    | dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth"), 4)
    | dict.fromkeys(("decoder_layers", "encoder_layers", "num_decoder_layers"), 2)
    | dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4)
    | dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4)
    | dict.fromkeys(("num_decoder_attention_heads", "num_encoder_attention_heads"), 4)
    | dict.fromkeys(("num_key_value_heads", "multi_query_group_num", "kv_n_heads"), 2)
    | dict.fromkeys(("head_dim", "attention_head_dim", "kv_channels", "dim_head"), 8)
    | dict.fromkeys(("mamba_n_heads", "n_mamba_heads", "mamba_num_heads"), 4)
    | dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_d_state", "state_size"), 16)
    | dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8)
    | dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 4)
    | dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4)
    | dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k", "moe_top_k"), 2)
    | dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1)
    | dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank"), 16)
    | {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "qk_head_dim": 12}
    | {"sliding_window": 6, "window_size": 6, "attention_window_size": 6, "image_size": 28}
    | dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 256)
    | dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "n_vocab"), VOCAB)
    | dict.fromkeys(("attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    | dict.fromkeys(("dropout", "residual_dropout", "hidden_dropout", "activation_dropout"), 0.0)
    | dict.fromkeys(("attention_probs_dropout_prob", "hidden_dropout_prob", "dropout_p"), 0.0)
    | dict.fromkeys(("layerdrop", "decoder_layerdrop", "encoder_layerdrop", "dropout_rate"), 0.0)
    | dict.fromkeys(("attn_dropout", "resid_dropout", "embed_dropout", "emb_dropout_prob"), 0.0)
    | dict.fromkeys(("router_jitter_noise", "input_jitter_noise", "attention_dropout_prob"), 0.0)
    | dict.fromkeys(("pad_token_id", "bos_token_id"), 1)
    | {"eos_token_id": 2, "decoder_start_token_id": 2, "use_cache": False, "is_decoder": True}
    | dict.fromkeys(("n_groups", "mamba_n_groups", "mamba_ngroups"), 1)
    | {"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0, "laurel_rank": 8}
)
MIXED = ["conv", "full_attention", "conv", "full_attention"]
OF_FAMILY: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "kimi_linear": {"num_experts_per_token": 2},
    "codegen": {"rotary_dim": 4},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gpt_neo": {
        "attention_types": [[["global", "local"], 2]],
        "attention_layers": ["global", "local"] * 2,
    },
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": MIXED},
    "lfm2_moe": {"layer_types": MIXED},
    "lfm2_vl": {"layer_types": MIXED},
    "mamba2": {"num_heads": 4, "head_dim": 16},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 8},
    "xlnet": {"d_head": 8},
    "xmod": {"default_language": "en_XX"},
    "xlstm": {"embedding_dim": 32, "num_blocks": 4},
}


CAUSAL, IMAGE_TEXT, ENCODER = KINDS = ("causal", "image-text", "encoder")


def cases() -> list[tuple[str, str]]:
    """Returns each family with its kinds; one that is causal is not tried with images too."""
    names = {kind: model_names(kind) for kind in KINDS}
    both = names[CAUSAL].keys() & names[IMAGE_TEXT].keys()
    found = [(family, kind) for kind in KINDS for family in names[kind]]
    return sorted(case for case in found if case[1] != IMAGE_TEXT or case[0] not in both)


def model_names(kind: str) -> dict[str, str]:
    """Returns the class of each family of a kind, as transformers' auto classes know it."""
    from transformers.models.auto import modeling_auto as auto

    mapping = {
        CAUSAL: auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        IMAGE_TEXT: auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        ENCODER: auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    }[kind]
    names = {family: name if isinstance(name, str) else name[0] for family, name in mapping.items()}
    if kind == ENCODER:  # without those that have a decoder too
        names = {f: name for f, name in names.items() if "ConditionalGeneration" not in name}
    return names


def model_class(family: str, kind: str) -> Any:
    import transformers

    return getattr(transformers, model_names(kind)[family])


def small_config(family: str, kind: str = CAUSAL) -> Any:
    """Returns the family's default config with small sizes and without dropout."""
    from transformers import CONFIG_MAPPING

    whole, own = CONFIG_MAPPING[family](), OF_FAMILY.get(family, {})
    own = own | ({"is_decoder": False} if kind == ENCODER else {})
    needed = model_class(family, kind).config_class
    config = next((part for part in _with_parts(whole) if isinstance(part, needed)), whole)
    for part in _with_parts(config):
        _shrink(part, own)
    try:
        return type(config).from_dict(config.to_dict())  # derives what depends on the sizes
    except Exception:
        sizes = {name: value for name, value in SMALL.items() if name in vars(config)}
        return type(config)(**sizes | own)


def _with_parts(config: Any) -> Iterator[Any]:
    from transformers import PreTrainedConfig

    yield config
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield from _with_parts(value)


def _shrink(config: Any, own: dict[str, Any]) -> None:
    entries = vars(config)
    old_layers = next((entries[n] for n in ("num_hidden_layers", "num_layers") if n in entries), 0)
    for name, small in SMALL.items():
        old = entries.get(name)
        if isinstance(old, (list, tuple)):
            setattr(
                config, name, small if name.endswith("token_id") else type(old)([small] * len(old))
            )
        elif old is not None and (isinstance(old, bool) or isinstance(small, bool) or old > small):
            setattr(config, name, small)
    if entries.get("head_dim", 0) is None:
        config.head_dim = 8
    if "qk_rope_head_dim" in entries:  # latent attention
        config.num_key_value_heads, config.head_dim = 4, 4
    for name, value in list(entries.items()):
        if isinstance(value, list) and old_layers > 4 and len(value) == old_layers:
            kinds = list(dict.fromkeys(value)) if isinstance(value[0], str) else []
            setattr(config, name, (kinds + value)[:4])
        elif name == "per_layer_config" and value:
            setattr(config, name, {key: x for key, x in value.items() if key < 4})
        elif name == "rope_parameters" and isinstance(value, dict):
            half = int(8 * value.get("partial_rotary_factor", 1.0)) // 2
            value["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]
    for name, value in own.items():
        if name in entries:
            setattr(config, name, value)


def model_of(family: str, attention: str, kind: str = CAUSAL) -> Any:
    made = model_class(family, kind)
    with torch.device("meta"):
        size = sum(p.numel() for p in made(small_config(family, kind)).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{size / 1e6:.0f} million parameters at its smallest")
    torch.manual_seed(0)
    config = small_config(family, kind)
    return made._from_config(config, attn_implementation=attention).float().train()
