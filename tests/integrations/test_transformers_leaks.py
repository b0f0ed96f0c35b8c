"""``find_leaks`` finds leaks and their layers, and reports none if there are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from integrations.family_models import model_of as family_model_of
from integrations.family_models import small_config
from integrations.tiny import model_of

pytest.importorskip("transformers", reason="transformers is not installed")

from distca.cli import main
from distca.integrations.transformers import register
from distca.integrations.transformers.leaks import LENGTHS, find_leaks


def test_none_where_documents_are_masked() -> None:
    for attention in ("sdpa", "eager"):
        assert find_leaks(model_of("gemma3", attention)) == []


def test_a_cache_switches_the_masks_of_documents_off() -> None:
    leaks = find_leaks(model_of("llama"), use_cache=True)
    assert [(leak.changed, leak.moved) for leak in leaks] == [
        (0, (1, 2, 3)),
        (1, (2, 3)),
        (2, (3,)),
    ]
    assert {leak.layer for leak in leaks} == {"model.layers.0.self_attn"}
    assert min(leak.by for leak in leaks) > 0.01


def test_masks_that_do_not_look_at_positions() -> None:
    leaks = find_leaks(model_of("opt"))
    assert leaks[0].layer == "model.decoder.layers.0.self_attn"


def test_one_layer_among_others_is_named() -> None:
    model = model_of("llama")
    layer = model.model.layers[1].self_attn
    forward = layer.forward

    def leaking(*args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        return forward(*args, attention_mask=None, **kwargs)

    layer.forward = leaking
    leaks = find_leaks(model)
    assert {leak.layer for leak in leaks} == {"model.layers.1.self_attn"}


def test_a_mixer_that_is_no_attention() -> None:
    """A sum over all tokens leaks in both directions."""

    class Mixed(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) + x.mean(1, keepdim=True)

    model = model_of("llama")
    model.model.layers[2].mlp = Mixed(model.model.layers[2].mlp)
    leaks = find_leaks(model)
    assert [leak.changed for leak in leaks] == [0, 1, 2, 3]
    assert {leak.layer for leak in leaks} == {"model.layers.2.mlp"}
    assert leaks[3].moved == (0, 1, 2)


def test_a_layer_that_changes_its_input_in_place() -> None:
    """Inputs are those before the call, and outputs those right after it."""

    class InPlace(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x.add_(x.mean(1, keepdim=True)))

    model = model_of("llama")
    model.model.layers[1].mlp = InPlace(model.model.layers[1].mlp)
    leaks = find_leaks(model)
    assert [leak.changed for leak in leaks] == [0, 1, 2, 3]
    assert {leak.layer for leak in leaks} == {"model.layers.1.mlp"}


@pytest.mark.parametrize("cu_seq_lens", [False, True])
@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "opt"])
def test_none_with_distca(name: str, use_cache: bool, cu_seq_lens: bool) -> None:
    register(cost="pairs")
    model = model_of(name, "distca")
    for gradients in (False, True):
        options = {"cu_seq_lens": cu_seq_lens, "gradients": gradients, "use_cache": use_cache}
        assert find_leaks(model, (130, 1, 7), **options) == []


def test_a_model_that_is_compiled_is_run_as_it_is_written() -> None:
    model = model_of("llama")
    compiled = torch.compile(model, backend="eager")
    assert find_leaks(compiled, use_cache=False) == []
    assert find_leaks(compiled, use_cache=True)


def test_one_document_cannot_leak() -> None:
    for lengths in ((), (9,), (5, 0, 3)):
        with pytest.raises(ValueError, match="give two or more, none of them empty"):
            find_leaks(model_of("llama"), lengths)


def test_weights_and_mode_are_left_alone() -> None:
    model = model_of("llama")
    before = {name: p.clone() for name, p in model.named_parameters()}
    state = torch.random.get_rng_state()
    find_leaks(model)
    assert model.training
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert torch.equal(state, torch.random.get_rng_state())
    assert not any(module._forward_hooks for module in model.modules())


def checked(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(["check", *args])
    said = capsys.readouterr()
    return int(end.value.code or 0), said.out, said.err


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model_of("llama").save_pretrained(tmp_path)
    status, out, _ = checked(capsys, str(tmp_path), "--json")
    rows, words = (json.loads(out)[key] for key in ("checks", "words"))
    assert status == 1
    assert words[0].startswith("With sdpa, packed documents see each other in 2 of 4 ways")
    assert words[1].startswith("With distca, packed documents are independent")
    assert {row["check"] for row in rows if row["passed"]} == {
        "sdpa, use_cache=False",
        "sdpa, use_cache=False, cu_seq_lens",
        "distca, use_cache=False",
        "distca, use_cache=False, cu_seq_lens",
        "distca, use_cache=True",
        "distca, use_cache=True, cu_seq_lens",
    }
    leak = next(row for row in rows if not row["passed"])["leaks"][0]
    assert leak["layer"] == "model.layers.0.self_attn"
    assert max(leak["moved"]) < len(LENGTHS)


def test_command_on_a_config_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_config("axk2").save_pretrained(tmp_path)
    status, out, _ = checked(capsys, str(tmp_path), "--attention", "eager", "--attention", "distca")
    assert status == 1
    assert "no document sees another" in out
    assert "computes with its masks" in " ".join(out.split())
    status, out, _ = checked(capsys, str(tmp_path), "--attention", "distca")
    assert status == 2
    assert out.splitlines()[-1] == "With distca, nothing could be checked."


def test_command_calls_as_in_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that is refused only with gradients does not pass, also in a narrow terminal."""
    monkeypatch.setenv("COLUMNS", "40")
    family_model_of("mamba", "eager").config.save_pretrained(tmp_path)
    status, out, _ = checked(capsys, str(tmp_path), "--attention", "distca")
    assert status == 2
    assert "has not called the attention that it was given" in " ".join(out.split())
    assert "skipped" in out


def test_command_on_other_kinds_of_models(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import BloomConfig, T5Config

    T5Config().save_pretrained(tmp_path)
    status, _, err = checked(capsys, str(tmp_path))
    assert status == 2
    assert err.rstrip().endswith("is of type t5, which is not a causal language model")
    BloomConfig(vocab_size=61, hidden_size=32, n_layer=1, n_head=4).save_pretrained(tmp_path)
    status, out, _ = checked(capsys, str(tmp_path), "--json")
    assert status == 2
    assert "supports only its own attention: use --attention eager" in out
    assert checked(capsys, str(tmp_path), "--attention", "eager")[0] == 1


def test_command_without_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = checked(capsys, str(tmp_path))
    assert status == 2
    assert "no config.json: give the folder of a transformers model" in err


def test_command_on_a_damaged_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = family_model_of("llama", "eager").config
    config.save_pretrained(tmp_path)
    for name, content in (
        ("model.safetensors", b"short"),
        ("config.json", b'{"model_type": "llama", "hidden_size": "32"}'),
        ("config.json", b"[" * 100_000),
    ):
        (tmp_path / name).write_bytes(content)
        status, _, err = checked(capsys, str(tmp_path))
        assert status == 2
        assert f"{tmp_path} cannot be loaded by transformers (" in err
        assert err.count("\n") == 1
