"""Reads and writes ``config.json`` of Hugging Face's Llama and Qwen3.

Every entry that changes the computation is either supported or refused. Rotary settings are read in
the format of transformers 4 (``rope_theta``, ``rope_scaling``) and 5 (``rope_parameters``), and
written in the former, which both can read.
"""

from collections.abc import Mapping
from typing import Any

from distca.model.config import ModelConfig, RopeScaling
from distca.schema import shown

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


_WHOLE = ("original_context",)  # the fields of RopeScaling that are whole numbers
_MOST_LAYERS = 1000
_INFINITE = 1e300
_WORDS = {
    int: "a whole number",
    float: "a finite number",
    bool: "true or false",
    str: "a string",
    list: "a list",
    dict: "a table",
}


def from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Returns the ModelConfig of a ``config.json``. Raises ValueError for unsupported entries."""
    if not isinstance(raw, Mapping):
        raise ValueError(f"config.json holds {shown(raw)}, not a table of entries")
    kind = _entry(raw, "model_type", str, "")
    if kind not in ARCHITECTURES:
        raise ValueError(
            f"model_type {kind!r} in config.json: only {' and '.join(ARCHITECTURES)} are supported"
        )
    for name, value in _MUST_BE.items():
        if raw.get(name, value) != value:
            raise ValueError(
                f"{name} = {shown(raw[name])} in config.json: only {value!r} is supported; choose"
                " another checkpoint"
            )
    sizes = {name: _size(raw, theirs) for name, theirs in _SIZES.items()}
    if sizes["layers"] > _MOST_LAYERS:
        raise ValueError(
            f"num_hidden_layers = {sizes['layers']} in config.json: at most {_MOST_LAYERS} are"
            " supported"
        )
    window, pattern = _windows(raw, sizes["layers"]) if kind == "qwen3" else (None, 0)
    theta, scaling = _rope(raw)
    head_dim = 128 if kind == "qwen3" else max(1, sizes["hidden"] // sizes["heads"])
    return ModelConfig(
        **sizes,
        kv_heads=_size(raw, "num_key_value_heads", sizes["heads"]),
        head_dim=_size(raw, "head_dim", head_dim),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=_entry(raw, "rms_norm_eps", float, 1e-6),
        qk_norm=kind == "qwen3",
        tied=_entry(raw, "tie_word_embeddings", bool, False),
        window=window,
        window_pattern=pattern,
        context=_size(raw, "max_position_embeddings", 2048 if kind == "llama" else 32768),
    )


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


def _entry(raw: Mapping[str, Any], name: str, kind: type, default: Any = None) -> Any:
    """Returns an entry of this type, or the default if it is null or missing.

    A whole number is also a float, but neither is a string or a truth value a number.
    """
    value = raw.get(name)
    if value is None and default is None:
        raise ValueError(f"config.json has no {name}: it is incomplete; download it again")
    if value is None:
        return default
    found = type(value)
    if kind is int and found is float and value.is_integer():
        return int(value)
    if kind is float and found in (int, float) and abs(value) < _INFINITE:
        return float(value)
    if kind is float or found is not kind:
        raise ValueError(
            f"{name} = {shown(value)} in config.json: it must be {_WORDS[kind]}; download the file"
            " again"
        )
    return value


def _size(raw: Mapping[str, Any], name: str, default: int | None = None) -> int:
    size: int = _entry(raw, name, int, default)
    if not 1 <= size < 2**31:
        raise ValueError(f"{name} = {shown(size)} in config.json: it must be from 1 to {2**31 - 1}")
    return size


def _rope(raw: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    rope: dict[str, Any] = {"rope_theta": _entry(raw, "rope_theta", float, 10000.0)}
    rope |= _entry(raw, "rope_scaling", dict, {}) | _entry(raw, "rope_parameters", dict, {})
    if nested := [name for name, value in rope.items() if isinstance(value, Mapping)]:
        raise ValueError(
            f"rope_parameters of {shown(', '.join(map(str, nested)))} in config.json: only rotary"
            " settings that all layers share are supported; choose another checkpoint"
        )
    kind = _entry(rope, "rope_type", str, _entry(rope, "type", str, "default"))
    partial = _entry(rope, "partial_rotary_factor", float, 1.0)
    if partial != 1.0:
        raise ValueError(
            f"partial_rotary_factor = {partial} in config.json: only rotation of whole heads is"
            " supported; choose another checkpoint"
        )
    theta: float = _entry(rope, "rope_theta", float)
    if kind == "default":
        return theta, None
    if kind not in _SCALING:
        raise ValueError(
            f"rope type {kind!r} in config.json: only default, linear and llama3 are supported;"
            " choose another checkpoint"
        )
    names = _SCALING[kind].items()
    settings = {n: _size(rope, t) if n in _WHOLE else _entry(rope, t, float) for n, t in names}
    return theta, RopeScaling(kind, **settings)


def _windows(raw: Mapping[str, Any], layers: int) -> tuple[int | None, int]:
    """Returns (window, window_pattern) of Qwen3's layer types."""
    slides = _entry(raw, "use_sliding_window", bool, False)
    window = _size(raw, "sliding_window", 4096) if slides else None
    first = _entry(raw, "max_window_layers", int, 28)  # the first layer with a window
    by_default = [SLIDING if window and layer >= first else FULL for layer in range(layers)]
    types = _entry(raw, "layer_types", list, by_default)
    if types == [FULL] * layers:
        return None, 0
    patterns = (0, *range(2, layers + 1)) if window is not None else ()
    for pattern in patterns:
        if types == [
            FULL if pattern and (layer + 1) % pattern == 0 else SLIDING for layer in range(layers)
        ]:
            return window, pattern
    raise ValueError(
        f"layer types {shown(types)} with window {window} in config.json: a"
        " window is supported on all layers, on none, or on all but every n-th; choose another"
        " checkpoint"
    )
