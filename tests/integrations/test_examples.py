"""Runs the examples unchanged on two local ranks."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from distca.runtime.launch import launch

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_transformers_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    path = EXAMPLES / "transformers_trainer.py"
    assert len(path.read_text().splitlines()) <= 40
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    launch([sys.executable, str(path)], 2, tmp_path / "logs")
    losses = re.findall(r"'loss': '?([0-9.]+)", capfd.readouterr().out)
    assert len(losses) == 5
    assert all(5 < float(loss) < 6 for loss in losses)


def test_trl_sft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("trl", reason="trl is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    launch([sys.executable, str(EXAMPLES / "trl_sft.py")], 2, tmp_path / "logs")
    said = capfd.readouterr().out
    losses = re.findall(r"'loss': '?([0-9.]+)", said)
    assert len(losses) == 5
    assert all(5 < float(loss) < 6 for loss in losses)
    assert "distca/imbalance" in said


def test_megatron_gpt(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    path = EXAMPLES / "megatron_gpt.py"
    assert len(path.read_text().splitlines()) <= 46
    launch([sys.executable, str(path)], 2, tmp_path / "logs")
    said = capfd.readouterr().out
    losses = re.findall(r"step \d rank 0 loss ([0-9.]+)", said)
    assert len(losses) == 5
    assert float(losses[-1]) < 5.2 < 5.4 < float(losses[0])
    before, after = (
        float(re.findall(rf"rank 0 .*distca/{name} ([0-9.]+)", said)[0])
        for name in ("imbalance_before", "imbalance")
    )
    assert 1 <= after < before
