"""The mark of torchrun's job in the folder of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from distca.train.torchrun_job import TorchrunJob


def attempt(folder: Path, restart: int, job: str | None, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Starts a rank as torchrun does; returns whether it has begun before."""
    monkeypatch.delenv("DISTCA_CHANNEL", raising=False)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restart))
    if job is None:
        monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    else:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", job)
    TorchrunJob(folder).forget_earlier()
    return TorchrunJob(folder).has_begun()


def test_restarts_of_a_job_that_has_begun_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not attempt(tmp_path / "new", 0, "a", monkeypatch)
    assert not attempt(tmp_path / "new", 1, "a", monkeypatch)  # the first one died before
    TorchrunJob(tmp_path / "new").begin()
    assert attempt(tmp_path / "new", 2, "a", monkeypatch)
    assert attempt(tmp_path / "new", 3, "a", monkeypatch)


@pytest.mark.parametrize("job", ["none", "another"])  # torchrun calls its jobs "none" by default
def test_the_mark_of_an_earlier_job_does_not_count(
    job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt(tmp_path, 0, "none", monkeypatch)
    TorchrunJob(tmp_path).begin()
    assert not attempt(tmp_path, 0, job, monkeypatch)
    assert not attempt(tmp_path, 1, job, monkeypatch)


def test_without_torchrun_there_is_no_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt(tmp_path, 0, None, monkeypatch)
    TorchrunJob(tmp_path).begin()
    assert not list(tmp_path.iterdir())
    assert not attempt(tmp_path, 1, None, monkeypatch)
