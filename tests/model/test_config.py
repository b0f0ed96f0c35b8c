from typing import Any

import pytest
from model.plain import tiny

from distca.model.config import ModelConfig, RopeScaling
from distca.model.llama import Llama, on_meta
from distca.model.sizes import MODEL_CONFIGS, model_config
from distca.planning.models import MODELS


def names_of(model: Llama) -> dict[str, int]:
    return {name: p.numel() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("config", "masks"),
    [
        (tiny(layers=4), ["causal"] * 4),
        (tiny(layers=4, window=5), ["window:5"] * 4),
        (tiny(layers=4, window=5, window_pattern=2), ["window:5", "causal"] * 2),
        (tiny(layers=4, window=5, window_pattern=3), ["window:5"] * 2 + ["causal", "window:5"]),
    ],
)
def test_masks_of_layers(config: ModelConfig, masks: list[str]) -> None:
    assert [str(config.mask_of(layer)) for layer in range(4)] == masks


@pytest.mark.parametrize("name", MODEL_CONFIGS)
def test_parameters_are_counted_right(name: str) -> None:
    config = model_config(name)
    assert config.num_parameters == sum(names_of(on_meta(config)).values())


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("debug", 1.9),
        ("150m", 153),
        ("1b", 1055),
        ("llama3-8b", 8030),
        ("llama-34b", 33744),
        ("llama3.2-1b", 1236),
        ("llama3.2-3b", 3213),
        ("llama3-70b", 70554),
        ("llama3.1-405b", 405853),
        ("qwen3-0.6b", 596),
        ("qwen3-8b", 8191),
        ("qwen3-32b", 32762),
        ("mistral-7b", 7248),
    ],
)
def test_sizes_are_the_published_ones(name: str, millions: float) -> None:
    assert model_config(name).num_parameters / 1e6 == pytest.approx(millions, rel=2e-3, abs=0.05)


def test_every_model_that_planning_knows_is_here() -> None:
    """But Qwen 2.5, whose queries have biases, and DeepSeek, whose attention is latent."""
    planned_only = {name for name in MODELS if name.startswith(("qwen2.5", "deepseek"))}
    assert MODELS.keys() - MODEL_CONFIGS.keys() == planned_only
    for name, known in MODELS.items() - {(name, MODELS[name]) for name in planned_only}:
        shape = model_config(name).shape
        assert (shape.heads, shape.kv_heads, shape.head_dim) == (
            known.heads,
            known.kv_heads,
            known.head_dim,
        )


def test_linear_flops_are_two_for_each_element_of_a_matrix() -> None:
    """Every matrix is multiplied once per token; the embedding is looked up."""
    config = tiny(qk_norm=True)
    matrices = sum(p.numel() for p in on_meta(config).parameters() if p.ndim == 2)
    embedding = config.vocab_size * config.hidden
    forward_and_backward = 3 * 2 * (matrices - embedding)
    assert config.shape.step_flops(tokens=1, pairs=0) == forward_and_backward
    assert tiny(qk_norm=True, tied=True).shape.step_flops(1, 0) == forward_and_backward


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"layers": 0}, "layers = 0: it must be from 1 to 10000"),
        ({"kv_heads": 3}, "4 heads over 3 kv heads: heads must be a multiple of kv_heads"),
        ({"head_dim": 7}, "head_dim = 7: .* even; use 8"),
        ({"rope_theta": 0.0}, "rope_theta = 0.0: it must be above 0"),
        ({"norm_eps": -1.0}, "norm_eps = -1.0: it must be above 0"),
        ({"window": 0}, "window = 0: .* None for all keys"),
        ({"window_pattern": 2}, "window_pattern = 2 without a window"),
        ({"window": 8, "window_pattern": 1}, "window_pattern = 1: .* set window = None"),
        ({"window": 8, "window_pattern": -1}, "window_pattern = -1"),
    ],
)
def test_a_wrong_config_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        tiny(**changes)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("yarn", 2.0), "'yarn' is unknown: choose linear or llama3"),
        (("linear", 0.5), "factor 0.5: it must be at least 1"),
        (("llama3", 2.0, 4.0, 1.0), "must be above 0 and increase"),
        (("llama3", 2.0, 1.0, 4.0, 0), "original_context = 0"),
    ],
)
def test_a_wrong_scaling_is_refused(arguments: tuple[Any, ...], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        RopeScaling(*arguments)


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(ValueError, match="'7b' is unknown: choose one of debug, 150m"):
        model_config("7b")
