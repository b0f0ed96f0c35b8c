"""Sweeps the model families of the installed transformers, as tiny models with random weights.

Each family is trained for one step on packed documents with ``attn_implementation="distca"``. The
reference is the same model with transformers' own attention, which gets each document as a row.

    PYTHONPATH=src:tests python -m integrations.families docs/integrations/transformers_families.md
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

COMMAND = (
    "PYTHONPATH=src:tests python -m integrations.families docs/integrations/transformers_families.md"
)
LENGTHS = (19, 7, 1, 12)
PADDED = "padding"
KINDS = {
    "equal": "Logits and gradients are those of the reference, whatever is given.",
    "refused": "One sentence says why, at the first training step at the latest.",
    "warned": "A warning names `distca check`.",
    "wrong": "None may be here.",
    "not built": "These could not be made small, or take no text alone.",
}
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
    "codegen": {"rotary_dim": 4},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "attention_layers": ["global", "local"] * 2},
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": MIXED},
    "lfm2_moe": {"layer_types": MIXED},
    "lfm2_vl": {"layer_types": MIXED},
    "mamba2": {"num_heads": 4, "head_dim": 16},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 8},
    "xlnet": {"d_head": 8},
    "xlstm": {"embedding_dim": 32, "num_blocks": 4},
}


@dataclass(frozen=True)
class Outcome:
    """What one family did. ``kind`` is equal, refused, warned, wrong or not built."""

    family: str
    kind: str
    words: str = ""


def families() -> list[str]:
    from transformers.models.auto import modeling_auto as auto

    causal = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return sorted(causal | auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)


def model_class(family: str) -> Any:
    import transformers
    from transformers.models.auto import modeling_auto as auto

    names = auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES | auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    name = names[family]
    return getattr(transformers, name if isinstance(name, str) else name[0])


def small_config(family: str) -> Any:
    """Returns the family's default config with small sizes and without dropout."""
    from transformers import CONFIG_MAPPING

    config, own = CONFIG_MAPPING[family](), OF_FAMILY.get(family, {})
    if model_class(family).config_class is not type(config):  # that of the text model
        config = config.get_text_config()
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
            setattr(config, name, small if name.endswith("token_id") else type(old)([small] * len(old)))
        elif old is not None and (isinstance(old, bool) or isinstance(small, bool) or old > small):
            setattr(config, name, small)
    if "qk_rope_head_dim" in entries:  # latent attention
        config.num_key_value_heads, config.head_dim = 4, 4
    for name, value in list(entries.items()):
        if isinstance(value, list) and old_layers > 4 and len(value) == old_layers:
            kinds = list(dict.fromkeys(value)) if isinstance(value[0], str) else []
            setattr(config, name, (kinds + value)[:4])
        elif isinstance(value, dict) and value and all(isinstance(key, int) for key in value):
            setattr(config, name, {key: x for key, x in value.items() if key < 4})
        elif isinstance(value, dict) and "mrope_section" in value:
            half = int(8 * value.get("partial_rotary_factor", 1.0)) // 2
            value["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]
    for name, value in own.items():
        if name in entries:
            setattr(config, name, value)


def model_of(family: str, attention: str) -> Any:
    kind = model_class(family)
    with torch.device("meta"):
        size = sum(p.numel() for p in kind(small_config(family)).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{size / 1e6:.0f} million parameters at its smallest")
    torch.manual_seed(0)
    return kind._from_config(small_config(family), attn_implementation=attention).float().train()


def packed(lengths: tuple[int, ...] = LENGTHS) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, VOCAB, (1, sum(lengths)), generator=draw)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return {"input_ids": tokens, "position_ids": positions}


def logits_by_document(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Returns the logits of each document as a row of its own."""
    parts = zip(*(batch[name].split(list(LENGTHS), dim=1) for name in batch), strict=True)
    given = (dict(zip(batch, part, strict=True)) for part in parts)
    return torch.cat([model(**one, use_cache=False).logits for one in given], 1)


def gradients(model: Any, logits: Tensor) -> Tensor:
    """Returns all gradients of a sum with random weights in one tensor."""
    model.zero_grad()
    draw = torch.Generator().manual_seed(1)
    (logits * torch.randn(logits.shape, generator=draw)).sum().backward()
    found = (p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters())
    return torch.cat([grad.flatten() for grad in found])


def ways(num_tokens: int) -> dict[str, dict[str, Any]]:
    """Returns further arguments with which trainers call models."""
    from transformers import DynamicCache

    ones = torch.ones(1, num_tokens, dtype=torch.int64)
    padded = ones.clone()
    padded[:, -3:] = 0
    return {
        "packed": {"use_cache": False},
        "a mask of ones": {"use_cache": False, "attention_mask": ones},
        "an empty cache": {"past_key_values": DynamicCache()},
        "use_cache=True": {"use_cache": True},
        PADDED: {"use_cache": False, "attention_mask": padded},
    }


def outcome(family: str) -> Outcome:
    try:
        model = model_of(family, "eager")
        right = logits_by_document(model, packed())
        exact = gradients(model, right)
    except Exception as error:
        return Outcome(family, "not built", _first(error))
    words: dict[str, str] = {}
    with recorded_warnings() as warned:
        for way, given in ways(sum(LENGTHS)).items():
            try:
                model = model_of(family, "distca")
                logits = model(**packed() | given).logits
                error = max(_error(logits, right), _error(gradients(model, logits), exact))
                words[way] = "" if error < 1e-4 else f"{way}: off by {error:.0%}"
            except Exception as raised:
                words[way] = _first(raised)
                if way == "packed":
                    return Outcome(family, "refused", words[way])
    wrong = [said for said in words.values() if ": off by " in said]
    if not words[PADDED]:
        wrong.append(f"{PADDED} is computed")
    if warned:
        return Outcome(family, "warned", warned[0])
    return Outcome(family, "wrong", "; ".join(wrong)) if wrong else Outcome(family, "equal")


def _error(found: Tensor, right: Tensor) -> float:
    if found.shape != right.shape:
        return float("inf")
    return float((found - right).norm() / right.norm())


def _first(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


@contextmanager
def recorded_warnings() -> Iterator[list[str]]:
    """Records the warnings of distca, of every model anew."""
    from distca.integrations.transformers import refusals

    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    refusals._log.addHandler(handler)
    refusals._checked.clear()
    try:
        yield found
    finally:
        refusals._log.removeHandler(handler)


REASONS = {  # what a refusal says, and the heading under which its families are listed
    "computes its attention itself": "compute their attention themselves, at load",
    "ignores position_ids": "ignore `position_ids`, with several documents in a row",
    "carries a state": "carry a state from token to token, with several documents in a row",
    "has not called": "never call the attention that they are given",
    "attention sinks": "have attention sinks",
    "caps its scores": "cap their scores",
    "bias to its scores": "add a bias to their scores",
    "neither causal": "have another kind of mask",
    "computes with its masks": "compute with their masks",
    "mask of its own": "give layers a mask of their own",
}


def table(outcomes: list[Outcome]) -> str:
    """Returns the page with all outcomes."""
    import transformers

    by_kind = {kind: [one for one in outcomes if one.kind == kind] for kind in KINDS}
    lines = [
        "# Families of transformers",
        "",
        f"Made by `{COMMAND}` with transformers {transformers.__version__}: each",
        "family with a causal or an image-text model, as a tiny model with random weights and text only, is",
        "trained for one step on four packed documents. Its logits and gradients are compared with those of",
        "transformers' `eager` attention, which gets each document as a row. Besides plain packed batches it",
        "is given an `attention_mask` of ones, an empty cache and `use_cache=True`; padding must be refused.",
        f"`tests/integrations/test_transformers_families.py` (`-m slow`) repeats it.",
        "",
    ]
    for kind, meaning in KINDS.items():
        found = by_kind[kind]
        lines += [f"## {kind.capitalize()}: {len(found)}", "", meaning, ""]
        if kind == "refused":
            lines += ["| families that | |", "|---|---|"]
            for said, heading in REASONS.items():
                names = [one.family for one in found if said in one.words]
                found = [one for one in found if said not in one.words]
                lines += [f"| {heading} | {_listed(names)} |"] if names else []
            lines += [f"| {one.words} | {_listed([one.family])} |" for one in found]
        elif kind == "equal":
            lines += [_listed([one.family for one in found])]
        elif found:
            lines += ["| family | |", "|---|---|"]
            lines += [f"| `{one.family}` | {one.words.replace('|', ' ')} |" for one in found]
        else:
            lines += ["None."]
        lines += [""]
    return "\n".join(lines)


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    import transformers

    from distca.integrations.transformers import register

    register(cost="pairs")
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    found = []
    for number, family in enumerate(families(), 1):
        found.append(outcome(family))
        print(number, found[-1], flush=True)
    Path(sys.argv[1]).write_text(table(found))
