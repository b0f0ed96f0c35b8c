from typing import Any

import pytest
from model.plain import tiny

from distca.model.config import ModelConfig, RopeScaling
from distca.model.hf_config import FULL, SLIDING, from_hf, to_hf
from distca.model.sizes import model_config

# As published with the models, without what only text generation reads.
LLAMA32_1B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def test_published_files_are_the_models_by_name() -> None:
    assert from_hf(LLAMA32_1B) == model_config("llama3.2-1b")
    assert from_hf(QWEN3_06B) == model_config("qwen3-0.6b")


def test_rotary_settings_as_transformers_5_writes_them() -> None:
    new = {k: v for k, v in LLAMA32_1B.items() if k not in ("rope_theta", "rope_scaling")}
    new["rope_parameters"] = LLAMA32_1B["rope_scaling"] | {"rope_theta": 500000.0}
    assert from_hf(new) == from_hf(LLAMA32_1B)
    plain = {"rope_type": "default", "rope_theta": 500000.0}
    assert from_hf(new | {"rope_parameters": plain}).rope_scaling is None


@pytest.mark.parametrize(
    "config",
    [
        tiny(),
        tiny(tied=True, rope_theta=5e5, rope_scaling=RopeScaling("llama3", 8.0, 1.0, 3.0, 64)),
        tiny(rope_scaling=RopeScaling("linear", 2.0), context=77),
        tiny(qk_norm=True, norm_eps=1e-6),
        tiny(qk_norm=True, window=4),
        tiny(qk_norm=True, window=4, window_pattern=2),
        model_config("llama3-8b"),
        model_config("qwen3-8b"),
    ],
)
def test_what_is_written_is_read(config: ModelConfig) -> None:
    assert from_hf(to_hf(config)) == config


def test_old_llamas_leave_things_out() -> None:
    left_out = ("head_dim", "num_key_value_heads", "rope_theta", "rope_scaling", "mlp_bias")
    config = from_hf({k: v for k, v in LLAMA32_1B.items() if k not in left_out})
    assert (config.head_dim, config.kv_heads, config.rope_theta) == (64, 32, 10000.0)


@pytest.mark.parametrize(
    ("base", "change", "sentence"),
    [
        (LLAMA32_1B, {"model_type": "gemma3"}, "'gemma3' in config.json: only llama and qwen3"),
        (LLAMA32_1B, {"attention_bias": True}, "attention_bias = True in config.json"),
        (LLAMA32_1B, {"mlp_bias": True}, "mlp_bias = True in config.json"),
        (LLAMA32_1B, {"hidden_act": "gelu"}, "hidden_act = 'gelu' .* only 'silu' is supported"),
        (LLAMA32_1B, {"quantization_config": {"bits": 4}}, "quantization_config"),
        (LLAMA32_1B, {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope type 'yarn'"),
        (LLAMA32_1B, {"rope_scaling": {"type": "linear"}}, "config.json has no factor"),
        (
            LLAMA32_1B,
            {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 5}}},
            "rope_parameters of 'full_attention' in config.json: only rotary settings that all",
        ),
        (
            LLAMA32_1B,
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            "partial_rotary_factor = 0.5 .* whole heads",
        ),
        (QWEN3_06B, {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 9}, ""),
        (QWEN3_06B, {"layer_types": [SLIDING] * 28}, "with window None"),
    ],
)
def test_what_the_model_cannot_do_is_refused(
    base: dict[str, Any], change: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(
        ValueError, match=sentence or "layer types .'full_attention', .* every n-th"
    ):
        from_hf(base | change)


def test_an_incomplete_file_is_refused() -> None:
    with pytest.raises(ValueError, match=r"config\.json has no hidden_size"):
        from_hf({k: v for k, v in QWEN3_06B.items() if k != "hidden_size"})


# Values of every type and sign, as a damaged or edited file may have them.
VALUES = [None, True, False, 0, -1, 3, 10**400, 0.5, -2.0, float("nan"), float("inf"), "", "8", "x"]
VALUES += [[], [1], ["full_attention"], {}, {"factor": "8"}, {"rope_type": ["llama3"]}, [[]]]


@pytest.mark.parametrize("base", [LLAMA32_1B, QWEN3_06B], ids=["llama", "qwen3"])
def test_every_entry_with_every_type_is_read_or_refused(base: dict[str, Any]) -> None:
    """Whatever is read has the types and signs of a model that can be built."""
    windows = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}
    base = base | windows | {"num_hidden_layers": 4}
    extra = ["rope_parameters", "layer_types", "partial_rotary_factor", "quantization_config"]
    nested = [("rope_scaling", name) for name in LLAMA32_1B["rope_scaling"]]
    for path in [*((name,) for name in [*base, *extra]), *nested]:
        for value in VALUES:
            raw = base | {"rope_scaling": dict(LLAMA32_1B["rope_scaling"])}
            (raw if len(path) == 1 else raw["rope_scaling"])[path[-1]] = value
            read = from_hf_or_words(raw)
            if isinstance(read, str):
                assert len(read.splitlines()) == 1, read
                assert len(read) < 300, read
                continue
            for name, kind in ModelConfig.__annotations__.items():
                given = getattr(read, name)
                assert kind not in (int, float, bool) or type(given) is kind, (path, value, name)


def from_hf_or_words(raw: dict[str, Any]) -> ModelConfig | str:
    try:
        return from_hf(raw)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"hidden_size": "2048"}, "hidden_size = '2048' in config.json: it must be a whole number"),
        ({"hidden_size": 2048.5}, "hidden_size = 2048.5 in config.json: it must be a whole number"),
        ({"hidden_size": True}, "hidden_size = True in config.json: it must be a whole number"),
        ({"num_attention_heads": 0}, "num_attention_heads = 0 in config.json: it must be from 1"),
        ({"num_key_value_heads": 0}, "num_key_value_heads = 0 in config.json: it must be from 1"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings = 'false' .* be true or false"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps = '1e-5' in config.json: it must be a finite"),
        ({"rope_theta": float("nan")}, "rope_theta = nan in config.json: it must be a finite"),
        ({"rope_scaling": "linear"}, "rope_scaling = 'linear' in config.json: it must be a table"),
        ({"model_type": ["llama"]}, r"model_type = \['llama'\] .* must be a string"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers = 1000000 .* at most 1000"),
    ],
)
def test_entries_of_another_type_are_named(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        from_hf(LLAMA32_1B | change)


def test_layer_types_as_a_pattern() -> None:
    windows = {"use_sliding_window": True, "sliding_window": 6, "num_hidden_layers": 5}
    types = [SLIDING, SLIDING, FULL, SLIDING, SLIDING]
    config = from_hf(QWEN3_06B | windows | {"layer_types": types})
    assert (config.window, config.window_pattern) == (6, 3)
    config = from_hf(QWEN3_06B | windows | {"max_window_layers": 0})
    assert (config.window, config.window_pattern) == (6, 0)


def test_a_window_without_a_home_is_refused() -> None:
    with pytest.raises(ValueError, match="Llama has no sliding window"):
        to_hf(tiny(window=4))
