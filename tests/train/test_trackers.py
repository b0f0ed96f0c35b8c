"""Figures of a run for TensorBoard, W&B and Prometheus, by one key of the config each."""

from __future__ import annotations

import socket
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from distca.train import trackers as subject
from distca.train.config import Config, LogSection
from distca.train.trackers import Trackers, check_trackers

RECORD = {
    "step": 7,
    "loss": 2.5,
    "tokens_per_s": 1000,
    "stopped": False,
    "mfu": None,
    "ranks": {"attention_s": [0.25, 0.5]},
}


def write(folder: Path, records: list[dict[str, Any]] | None = None, **config: Any) -> None:
    trackers = Trackers(LogSection(**config), folder, {"train": {"steps": 9}})
    for record in records or [RECORD]:
        trackers.write(record)
    trackers.close()


def test_prometheus_reads_the_newest_step(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
    from prometheus_client.parser import text_string_to_metric_families

    write(tmp_path, [RECORD | {"step": 6, "loss": 3.0}, RECORD], prometheus=True)
    text = (tmp_path / "metrics.prom").read_text()
    found = {
        (sample.name, sample.labels.get("rank")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert found == {
        ("distca_step", None): 7,
        ("distca_loss", None): 2.5,
        ("distca_tokens_per_s", None): 1000,
        ("distca_rank_attention_s", "0"): 0.25,
        ("distca_rank_attention_s", "1"): 0.5,
    }


def test_prometheus_on_a_port_of_this_machine_only(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = LogSection(prometheus=True, prometheus_port=port)
    trackers = Trackers(config, tmp_path, {})
    trackers.write(RECORD)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        assert b"distca_loss 2.5" in answer.read()
    with pytest.raises(ValueError, match=rf"prometheus_port = {port} cannot be opened .*: choose"):
        Trackers(config, tmp_path, {})
    trackers.close()
    with socket.create_server(("127.0.0.1", port)):
        pass  # free again


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write(tmp_path, tensorboard=True)
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [(event.step, event.value) for event in board.Scalars("loss")] == [(7, 2.5)]
    assert set(board.Tags()["scalars"]) == {"loss", "tokens_per_s"}


def test_wandb_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run continues that of the first."""
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    write(tmp_path, wandb="tests")
    identity = (tmp_path / "wandb-id").read_text()
    write(tmp_path, [RECORD | {"step": 8}], wandb="tests")
    assert (tmp_path / "wandb-id").read_text() == identity
    files = list((tmp_path / "wandb").glob(f"offline-run-*-{identity}*/run-{identity}.wandb"))
    assert files
    assert any(b"tokens_per_s" in path.read_bytes() for path in files)


@pytest.mark.parametrize("key", ["tensorboard", "wandb", "prometheus"])
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setattr(subject, "find_spec", lambda name: None)
    check_trackers(LogSection())
    config = LogSection(**{key: "project" if key == "wandb" else True})
    with pytest.raises(ValueError, match=rf"log\.{key} is set, but .*'distca\[{key}\]'"):
        check_trackers(config)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["log.prometheus_port=70000", "log.prometheus=true"], "it must be at most 65535"),
        (["log.prometheus_port=9000"], "without log.prometheus: set both"),
    ],
)
def test_ports_that_cannot_be_meant(settings: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Config.read(None, settings)
