"""Reads and writes ``config.json`` of Hugging Face's Llama and Qwen3.

Every entry that changes the computation is either supported or refused. Rotary settings are read in
the format of transformers 4 (``rope_theta``, ``rope_scaling``) and 5 (``rope_parameters``), and
written in the former, which both can read.
"""

from collections.abc import Mapping
from typing import Any

from distca.model.config import ModelConfig, RopeScaling

FULL, SLIDING = "full_attention", "sliding_attention"
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}

# The only supported values, which are also the defaults of transformers.
_MUST_BE: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
}

_SIZES = {
    "vocab_size": "vocab_size",
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "ffn": "intermediate_size",
}

# The fields of RopeScaling that each kind uses, and what Hugging Face calls them.
_SCALING: dict[str, dict[str, str]] = {
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_context": "original_max_position_embeddings",
    },
}


def from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Returns the ModelConfig of a ``config.json``. Raises ValueError for unsupported entries."""
    kind = raw.get("model_type")
    if kind not in ARCHITECTURES:
        raise ValueError(
            f"model_type {kind!r} in config.json: only {' and '.join(ARCHITECTURES)} are supported"
        )
    for name, value in _MUST_BE.items():
        if raw.get(name, value) != value:
            raise ValueError(
                f"{name} = {raw[name]!r} in config.json: only {value!r} is supported; choose"
                " another checkpoint"
            )
    try:
        sizes = {name: int(raw[theirs]) for name, theirs in _SIZES.items()}
        window, pattern = _windows(raw, sizes["layers"]) if kind == "qwen3" else (None, 0)
        theta, scaling = _rope(raw)
        head_dim = 128 if kind == "qwen3" else sizes["hidden"] // sizes["heads"]
        return ModelConfig(
            **sizes,
            kv_heads=raw.get("num_key_value_heads") or sizes["heads"],
            head_dim=raw.get("head_dim") or head_dim,
            rope_theta=theta,
            rope_scaling=scaling,
            norm_eps=raw.get("rms_norm_eps", 1e-6),
            qk_norm=kind == "qwen3",
            tied=raw.get("tie_word_embeddings", False),
            window=window,
            window_pattern=pattern,
            context=raw.get("max_position_embeddings", 2048 if kind == "llama" else 32768),
        )
    except KeyError as error:
        raise ValueError(
            f"config.json has no {error.args[0]}: it is incomplete; download it again"
        ) from None


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """Returns the ``config.json`` of a model. Raises ValueError if transformers has none."""
    kind = "qwen3" if config.qk_norm else "llama"
    if config.window is not None and kind == "llama":
        raise ValueError(
            f"window = {config.window} without qk_norm: Hugging Face's Llama has no sliding window;"
            " such a model can only be saved in training checkpoints"
        )
    raw: dict[str, Any] = {
        "model_type": kind,
        "architectures": [ARCHITECTURES[kind]],
        **{theirs: getattr(config, name) for name, theirs in _SIZES.items()},
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied,
        "max_position_embeddings": config.context,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
    }
    if (scaling := config.rope_scaling) is not None:
        names = _SCALING[scaling.kind].items()
        settings = {theirs: getattr(scaling, name) for name, theirs in names}
        raw["rope_scaling"] = {"rope_type": scaling.kind} | settings
    if config.window is not None:
        masks = [config.mask_of(layer) for layer in range(config.layers)]
        raw |= {
            "use_sliding_window": True,
            "sliding_window": config.window,
            "max_window_layers": 0,
            "layer_types": [SLIDING if m.reach == config.window else FULL for m in masks],
        }
    return raw


def _rope(raw: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    known = {"rope_theta": raw.get("rope_theta", 10000.0)}
    rope = known | (raw.get("rope_scaling") or {}) | (raw.get("rope_parameters") or {})
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(
            f"partial_rotary_factor = {rope['partial_rotary_factor']} in config.json: only"
            " rotation of whole heads is supported; choose another checkpoint"
        )
    if kind == "default":
        return rope["rope_theta"], None
    if kind not in _SCALING:
        raise ValueError(
            f"rope type {kind!r} in config.json: only default, linear and llama3 are supported;"
            " choose another checkpoint"
        )
    settings = {name: rope[theirs] for name, theirs in _SCALING[kind].items()}
    return rope["rope_theta"], RopeScaling(kind, **settings)


def _windows(raw: Mapping[str, Any], layers: int) -> tuple[int | None, int]:
    """Returns (window, window_pattern) of Qwen3's layer types."""
    window = raw.get("sliding_window", 4096) if raw.get("use_sliding_window", False) else None
    first = raw.get("max_window_layers", 28)  # the first layer with a window
    by_default = [SLIDING if window and layer >= first else FULL for layer in range(layers)]
    types = raw.get("layer_types") or by_default
    if types == [FULL] * layers:
        return None, 0
    patterns = (0, *range(2, layers + 1)) if window is not None else ()
    for pattern in patterns:
        if types == [
            FULL if pattern and (layer + 1) % pattern == 0 else SLIDING for layer in range(layers)
        ]:
            return window, pattern
    raise ValueError(
        f"layer types {', '.join(map(str, types))} with window {window} in config.json: a"
        " window is supported on all layers, on none, or on all but every n-th; choose another"
        " checkpoint"
    )
