"""Models by the config.json of a folder: sizes of any family, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distca.cli.model_shapes import check_dense, named_shape
from distca.planning.costs.profile import Profile
from distca.planning.models import MODELS, ModelShape

LLAMA = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}


def write(folder: Path, config: object) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (LLAMA, ("llama3-8b", 32, 8, 128, 32, 4096, 14336, 128256)),
        ({"text_config": LLAMA | {"head_dim": 96}}, ("", 32, 8, 96, 32, 4096, 14336, 128256)),
        (
            {"n_head": 12, "n_embd": 768, "n_layer": 6, "vocab_size": 50257, "n_inner": None},
            ("gpt2", 12, 12, 64, 6, 768, 3072, 50257),
        ),
    ],
    ids=["llama", "with images", "gpt2"],
)
def test_sizes_of_a_folder(tmp_path: Path, config: dict, shape: tuple) -> None:
    expected = ModelShape(tmp_path.name, *shape[1:])
    assert named_shape(write(tmp_path, config), "") == expected
    assert named_shape(str(tmp_path / "config.json"), "") == expected


def test_a_folder_of_the_name_of_a_model_is_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama3-8b").mkdir()
    assert named_shape("llama3-8b", "") == MODELS["llama3-8b"]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (LLAMA | {"hidden_size": "big"}, r"hidden_size = 'big' in .*must be a whole number"),
        ({"vocab_size": 10}, r"num_attention_heads = None in .*give the sizes as options"),
        ([1], r"config.json is not a table of entries"),
    ],
)
def test_refusals(tmp_path: Path, config: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        named_shape(write(tmp_path, config), "")


def test_what_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config.json cannot be read .*as Hugging Face writes it"):
        named_shape(str(tmp_path), "")
    with pytest.raises(ValueError, match=r"model 'x' is unknown: .*Hugging Face folder, or sizes"):
        named_shape("x", ", or sizes")


def test_experts_are_not_simulated(tmp_path: Path) -> None:
    check_dense("llama3-8b")
    check_dense(write(tmp_path, LLAMA))
    with pytest.raises(ValueError, match=r"has 64 experts \(num_local_experts\).*give --ffn"):
        check_dense(write(tmp_path, LLAMA | {"num_local_experts": 64}))


def test_a_gpu_by_its_rates() -> None:
    half, whole = Profile.read("scaled:494.5:2400"), Profile.read("h200")
    assert half.linear_tflops == pytest.approx(whole.linear_tflops / 2)
    assert half.copy_bytes_per_s == pytest.approx(whole.copy_bytes_per_s / 2)
    assert half.forward_tflops[0][0] == pytest.approx(whole.forward_tflops[0][0] / 2)
    assert Profile.read("scaled:989:3350").forward_tflops == Profile.read("h100").forward_tflops


@pytest.mark.parametrize(
    "name", ["scaled:", "scaled:1", "scaled:1:2:3", "scaled:0:1", "scaled:x:1"]
)
def test_rates_that_cannot_be_meant(name: str) -> None:
    with pytest.raises(ValueError, match=r"write the dense bf16 TFLOP/s of the GPU and the GB/s"):
        Profile.read(name)


def test_latent_attention(tmp_path: Path) -> None:
    """DeepSeek-V3: every head has keys and values, which are made of latents."""
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128}
    config = LLAMA | sizes | {"num_attention_heads": 128, "v_head_dim": 128}
    found, known = named_shape(write(tmp_path, config), ""), MODELS["deepseek-v3"]
    assert (found.kv_bytes, found.kv_memory_bytes) == (known.kv_bytes, known.kv_memory_bytes)
    assert (found.q_bytes, found.expansion_bytes) == (known.q_bytes, known.expansion_bytes)
    with pytest.raises(ValueError, match=r"v_head_dim = None in .*: it must be a whole number"):
        named_shape(write(tmp_path, LLAMA | sizes), "")
