"""Models by name, or by the ``config.json`` of a Hugging Face folder, of any family.

Planning and simulation need sizes only, so other entries of the file do not matter to them.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distca.planning.models import MODELS, ModelShape
from distca.schema import choose

CONFIG = "config.json"
# What families call the same size; the first that a file has counts.
_NAMES = {
    "heads": ("num_attention_heads", "n_head"),
    "layers": ("num_hidden_layers", "n_layer"),
    "hidden": ("hidden_size", "n_embd"),
    "vocab_size": ("vocab_size",),
}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def named_shape(name: str, otherwise: str) -> ModelShape:
    """Returns the shape of a model; ``otherwise`` says what else can be given."""
    if (file := _config_file(name)) is None:
        return choose(MODELS, name, "model", f", give a Hugging Face folder{otherwise}")
    raw = _read(file)
    sizes = {ours: _size(raw, theirs, file) for ours, theirs in _NAMES.items()}
    if raw.get("kv_lora_rank"):
        return _latent_shape(raw, sizes, file)
    return ModelShape(
        file.resolve().parent.name,
        **sizes,
        kv_heads=_size(raw, ("num_key_value_heads",), file, sizes["heads"]),
        head_dim=_size(raw, ("head_dim",), file, sizes["hidden"] // sizes["heads"]),
        ffn=_size(raw, ("intermediate_size", "n_inner", "ffn_dim"), file, 4 * sizes["hidden"]),
    )


def _latent_shape(raw: Mapping[str, Any], sizes: dict[str, int], file: Path) -> ModelShape:
    """Returns the shape of a model with latent attention: every head has keys and values."""
    latent, rope, plain, values = (
        _size(raw, (name,), file)
        for name in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    )
    return ModelShape(
        file.resolve().parent.name,
        **sizes,
        kv_heads=sizes["heads"],
        head_dim=plain + rope,
        v_head_dim=values,
        latent_dim=latent,
        rope_dim=rope,
        ffn=_size(raw, ("intermediate_size",), file, 4 * sizes["hidden"]),
    )


def check_dense(name: str) -> None:
    """Raises ValueError for a model whose feed-forward layers differ by token."""
    if (file := _config_file(name)) is None:
        return
    raw = _read(file)
    for entry in _EXPERTS:
        if raw.get(entry):
            raise ValueError(
                f"{file} has {raw[entry]} experts ({entry}), which are not simulated: give --ffn,"
                " the width of all experts that one token uses; their memory is not counted then"
            )


def _config_file(name: str) -> Path | None:
    """Returns the ``config.json`` that a name stands for; None for the name of a known model."""
    path = Path(name)
    if path.name == CONFIG and path.is_file():
        return path
    if not path.is_dir() or (name in MODELS and not (path / CONFIG).is_file()):
        return None
    return path / CONFIG


def _read(file: Path) -> Mapping[str, Any]:
    """Returns the entries of a model; those of its text model if it has several."""
    try:
        raw = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{file} cannot be read ({error}): give the folder of a model as Hugging Face writes it"
        ) from None
    if isinstance(raw, Mapping) and isinstance(raw.get("text_config"), Mapping):
        raw = raw["text_config"]
    if not isinstance(raw, Mapping):
        raise ValueError(f"{file} is not a table of entries: download it again")
    return raw


def _size(
    raw: Mapping[str, Any], names: tuple[str, ...], file: Path, default: int | None = None
) -> int:
    name = next((name for name in names if raw.get(name) is not None), names[0])
    value = raw.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(
            f"{name} = {value!r} in {file}: it must be a whole number, 1 or more; give the sizes as"
            " options instead"
        )
    return value
