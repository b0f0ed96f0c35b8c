"""Every family of transformers is right, refused or warned about; none is silently wrong."""

from __future__ import annotations

import logging
import os
from typing import Any

import pytest
import torch
from integrations.families import LIMIT_S, documented, outcome, outcome_in_process
from integrations.family_models import CAUSAL, cases, model_of
from integrations.tiny import model_of as tiny_model
from integrations.tiny import packed

pytest.importorskip("transformers", reason="transformers is not installed")

import transformers
from transformers import AutoModelForCausalLM

from distca.integrations.transformers import refusals, register


@pytest.fixture(autouse=True)
def _registered() -> None:
    register(cost="pairs")
    transformers.logging.set_verbosity_error()


@pytest.mark.parametrize(
    "family",
    ["ctrl", "fuyu", "gpt_bigcode", "ministral3", "moshi", "persimmon", "whisper"],
)
def test_layers_that_are_given_no_positions(family: str) -> None:
    """With a mask of ones, an empty cache or ``use_cache=True`` a row was taken as one document."""
    assert outcome(family).result == "exact", outcome(family).words


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("openai-gpt", "computes its attention itself"),
        ("cpmant", "computes its attention itself"),
        ("gptj", "computes its attention itself"),  # a KeyError of transformers
        ("git", "computes its attention itself"),  # a KeyError, in a model with several configs
        ("bart", "ignores position_ids"),
        ("mamba", "has not called the attention"),
    ],
)
def test_models_that_mix_documents_are_refused(family: str, words: str) -> None:
    found = outcome(family)
    assert (found.result, words in found.words) == ("refused", True), found


@pytest.mark.parametrize("family", ["bart", "jamba", "qwen3_next"])
def test_a_document_in_each_row_is_computed(family: str) -> None:
    tokens = packed([40])["input_ids"].view(2, 20)
    right, found = (model_of(family, one)(tokens).logits for one in ("eager", "distca"))
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)


def test_models_that_mix_documents_are_refused_with_plans_too() -> None:
    (batch,) = register(cost="pairs").plan_ahead([packed([20, 9])])
    with pytest.raises(ValueError, match=r"layer 0 .*BartForCausalLM, .*ignores position_ids"):
        model_of("bart", "distca")(**batch)


def test_positions_that_do_not_restart() -> None:
    """Only rotary positions need not restart, since their differences count."""
    batch, offsets = packed([20, 9]), torch.tensor([0, 20, 29], dtype=torch.int32)
    given = {"input_ids": batch["input_ids"], "cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets}
    model = tiny_model("llama", "distca")
    torch.testing.assert_close(model(**given).logits, model(**batch).logits, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=r"belongs to GPT2Model, .*no position_ids that restart"):
        model_of("gpt2", "distca")(**given)


SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 64, "pad_token_id": 0,
}  # fmt: skip
ROPE = {"rope_theta": 1e4, "original_max_position_embeddings": 16}
LONGROPE = ROPE | {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [8.0] * 4}
SCALED = ROPE | {"rope_type": "yarn", "factor": 4.0, "llama_4_scaling_beta": 0.5}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("Phi3Config", {"original_max_position_embeddings": 16, "rope_parameters": LONGROPE}),
        ("LlamaConfig", {"rope_parameters": ROPE | {"rope_type": "dynamic", "factor": 2.0}}),
        ("Ministral3Config", {"head_dim": 8, "rope_parameters": SCALED}),
        ("RecurrentGemmaConfig", {"lru_width": 32, "block_types": ["recurrent", "attention"]}),
    ],
)
def test_positions_that_have_to_restart(kind: str, options: dict[str, Any]) -> None:
    """The longest position of a row counts, or the place of a query, or where a state begins."""
    config = getattr(transformers, kind)(**SMALL, **options, max_position_embeddings=64)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="distca")
    batch, offsets = packed([12, 10, 7]), torch.tensor([0, 12, 22, 29], dtype=torch.int32)
    batch["input_ids"] %= 64
    given = {"input_ids": batch["input_ids"], "cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets}
    with torch.no_grad():
        found = model(**batch, use_cache=False).logits[0].split([12, 10, 7])
        alone = [
            model(part[None], use_cache=False).logits[0]
            for part in batch["input_ids"][0].split([12, 10, 7])
        ]
    for mine, right in zip(found, alone, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=r"no position_ids that restart: give them too"):
        model(**given, use_cache=False)


def test_queries_that_are_scaled_by_their_place_in_the_row() -> None:
    """Llama 4 does so from token 8,192 on, whatever its position_ids are."""
    options = {"head_dim": 8, "intermediate_size_mlp": 64, "num_local_experts": 2}
    config = transformers.Llama4TextConfig(**SMALL | {"num_hidden_layers": 4}, **options)
    assert config.floor_scale == 8192
    config.floor_scale = 24
    model = AutoModelForCausalLM.from_config(config, attn_implementation="distca")
    short, long = (packed(lengths) for lengths in ([12, 11], [12, 12]))
    for batch in (short, long):
        batch["input_ids"] %= 64
    model(**short, use_cache=False)
    with pytest.raises(
        ValueError, match=r"from token 24 on \(attn_temperature_tuning\): make rows"
    ):
        model(**long, use_cache=False)


@pytest.mark.parametrize("family", ["bart", "mbart", "marian", "pegasus", "opt"])
def test_position_ids_are_advised_only_to_models_that_take_them(family: str) -> None:
    batch, offsets = packed([20, 9]), torch.tensor([0, 20, 29], dtype=torch.int32)
    given = {"input_ids": batch["input_ids"], "cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets}
    with pytest.raises(ValueError, match=r"^layer 0 .*give each document a row of its") as refused:
        model_of(family, "distca")(**given)
    advised = "give them too" in str(refused.value)
    assert advised == (family == "opt")
    assert advised != ("takes no position_ids, so that" in str(refused.value))


def test_a_layer_without_a_number_is_named_by_its_class() -> None:
    """Some models have layers whose number is None."""
    model = model_of("mbart", "distca")
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            module.layer_idx, module.dropout = None, 0.5
    with pytest.raises(ValueError, match=r"^a layer \(MBartAttention\) uses attention dropout"):
        model(**packed([20, 9]))


class Skipping(torch.nn.Module):
    """A layer in place of an attention layer."""

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        return hidden_states, None


def test_what_is_not_known_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    refusals._checked.clear()
    model = tiny_model("llama", "distca")
    model.model.layers[1].self_attn = Skipping()
    with caplog.at_level(logging.WARNING, logger=refusals.__name__):
        model(**packed([29]))  # one document
        assert not caplog.messages
        for _ in range(2):
            model(**packed([20, 9]))
    (said,) = caplog.messages
    assert "LlamaForCausalLM has layers that do not call distca's attention" in said
    assert "(model.layers.1)" in said
    assert "`distca check MODEL_DIR`" in said


def test_models_of_the_users_own_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    class Own(transformers.LlamaForCausalLM):  # type: ignore[misc]
        pass

    model = tiny_model("llama", "distca")
    own = Own(model.config)
    with caplog.at_level(logging.WARNING, logger=refusals.__name__):
        own(**packed([20, 9]))
    assert "Own is not one of transformers' own models" in caplog.text
    assert "`distca check MODEL_DIR`" in caplog.text


def test_a_model_that_calls_no_attention_of_ours_is_refused() -> None:
    model = tiny_model("llama", "distca")
    for layer in model.model.layers:
        layer.self_attn = Skipping()
    with pytest.raises(ValueError, match="LlamaForCausalLM has not called the attention"):
        model(**packed([20, 9]))
    with torch.no_grad():
        with pytest.raises(ValueError, match="LlamaForCausalLM has not called the attention"):
            model(**packed([20, 9]))
        model(**packed([20]))


@pytest.mark.parametrize("family", ["layoutlm", "fnet"])
def test_encoders_that_mix_documents_are_refused_without_gradients(family: str) -> None:
    kinds = {"layoutlm": transformers.LayoutLMForMaskedLM, "fnet": transformers.FNetForMaskedLM}
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    config = kinds[family].config_class(**sizes)
    config.num_attention_heads = 4
    model = kinds[family]._from_config(config, attn_implementation="distca").eval()
    words = "has not called the attention|mask of its own, so that documents cannot be told apart"
    with torch.no_grad():
        with pytest.raises(ValueError, match=words):
            model(**packed([20, 9]))
        model(**packed([20]))


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize(("family", "kind"), cases())
def test_families_are_as_documented(family: str, kind: str) -> None:
    found = outcome_in_process(family, kind)
    assert found == documented().get((family, kind), "not on the page")
    assert found.result != "wrong"


def test_families_that_are_gone_are_not_documented() -> None:
    assert documented().keys() <= set(cases())


def test_a_process_that_crashes_is_an_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("integrations.families.outcome", lambda *_: os._exit(3))
    assert outcome_in_process("llama", CAUSAL).words == "its process ends with 3"
