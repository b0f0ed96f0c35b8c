"""Models by name."""

from typing import Any

from distca.model.config import SIZES, ModelConfig, RopeScaling
from distca.planning.models import model_shape
from distca.schema import choose


def model_config(name: str) -> ModelConfig:
    """Returns a model by name; for another one, build a ``ModelConfig``."""
    return choose(MODEL_CONFIGS, name, "model", ", or give the sizes as a ModelConfig")


def _published(name: str, **rest: Any) -> ModelConfig:
    """Returns a published model, with the sizes that the planner has for it."""
    shape = model_shape(name)
    return ModelConfig(**{size: getattr(shape, size) for size in SIZES}, **rest)


_LLAMA3: dict[str, Any] = {"rope_theta": 500000.0}
_LLAMA32: dict[str, Any] = _LLAMA3 | {
    "rope_scaling": RopeScaling("llama3", 32.0),
    "tied": True,
    "context": 131072,
}
_QWEN3: dict[str, Any] = {
    "rope_theta": 1000000.0,
    "norm_eps": 1e-6,
    "qk_norm": True,
    "context": 40960,
}

MODEL_CONFIGS: dict[str, ModelConfig] = {
    # The vocabulary is 256 bytes and the tokens bos, eos and pad.
    "debug": ModelConfig(
        vocab_size=259, hidden=256, layers=4, heads=8, kv_heads=4, head_dim=32, ffn=320
    ),
    # The vocabulary of GPT-2, padded to a multiple of 64.
    "150m": ModelConfig(
        vocab_size=50304, hidden=768, layers=12, heads=12, kv_heads=4, head_dim=64, ffn=2048
    ),
    "1b": ModelConfig(
        vocab_size=50304, hidden=2048, layers=18, heads=16, kv_heads=8, head_dim=128, ffn=5632
    ),
    "llama3-8b": _published("llama3-8b", **_LLAMA3),
    "llama-34b": _published("llama-34b", rope_theta=1000000.0, context=16384),
    "llama3-70b": _published("llama3-70b", **_LLAMA3),
    "llama3.1-405b": _published(
        "llama3.1-405b", **_LLAMA3, rope_scaling=RopeScaling("llama3", 8.0), context=131072
    ),
    "llama3.2-1b": _published("llama3.2-1b", **_LLAMA32),
    "llama3.2-3b": _published("llama3.2-3b", **_LLAMA32),
    "qwen3-0.6b": _published("qwen3-0.6b", **_QWEN3, tied=True),
    "qwen3-8b": _published("qwen3-8b", **_QWEN3),
    "qwen3-32b": _published("qwen3-32b", **_QWEN3),
    "mistral-7b": _published("mistral-7b", rope_theta=1000000.0, context=32768),
}
