"""A config for a machine: it fits, it is the fastest that does, and it can be read and trained."""

from __future__ import annotations

import json
from itertools import takewhile
from pathlib import Path

import pytest
import torch

from distca.cli import main
from distca.model.sizes import model_config
from distca.pipeline.memory import GIB
from distca.train import first_config as subject
from distca.train.config import Config
from distca.train.memory import memory_of
from distca.train.setup import parallel_of

GPU = torch.device("cuda", 0)


@pytest.fixture
def h100(monkeypatch: pytest.MonkeyPatch) -> int:
    available = 76 * GIB
    monkeypatch.setattr(subject, "available_bytes", lambda *_: available)
    return available


@pytest.mark.parametrize(
    ("model", "context", "ranks"),
    [("1b", 32768, 1), ("llama3-8b", 65536, 8), ("llama3-70b", 131072, 64), ("qwen3-8b", 4096, 6)],
)
def test_the_fastest_that_fits_is_taken(h100: int, model: str, context: int, ranks: int) -> None:
    chosen = subject.first_config(model, (), context, ranks, GPU)
    assert chosen.memory.total <= subject.SPARE * h100
    known = model_config(model)
    sections = (chosen.config.model, chosen.config.data)
    candidates = subject._candidates(*sections, known, ranks, GPU)
    for config in takewhile(lambda config: config != chosen.config, candidates):
        memory = memory_of(config, parallel_of(config, ranks), known, GPU)
        assert memory.total > subject.SPARE * h100


def test_what_does_not_fit_is_refused(h100: int) -> None:
    words = r"llama3-70b with a context of 1048576 needs about .* GiB on each of 2 ranks, .*: use"
    with pytest.raises(ValueError, match=words):
        subject.first_config("llama3-70b", (), 1 << 20, 2, GPU)
    with pytest.raises(ValueError, match=r"model 'x' is unknown: .* or give a folder"):
        subject.first_config("x", (), None, 2, GPU)


def run(*words: str) -> int | str | None:
    with pytest.raises(SystemExit) as ended:
        main(["init", *words])
    return ended.value.code


def test_the_command_writes_what_can_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.toml"
    assert run(str(path), "--data", "a.jsonl", "--context", "2K", "--ranks", "2") == 0
    assert f"Next: distca train {path} --ranks 2" in capsys.readouterr().out
    config = Config.read(path)
    assert config.data.sources == ("a.jsonl",)
    assert config.data.context == 2048
    assert config.train.tokens_per_step % 2048 == 0
    assert run(str(path)) == 2
    assert "exists: give another name, or --force" in capsys.readouterr().err
    assert run(str(path), "--force", "--json") == 0
    assert json.loads(capsys.readouterr().out)["config"] == str(path)
    assert Config.read(path).data.sources == ("stdlib",)
    assert run(str(path), "--force", "--ranks", "0") == 2
