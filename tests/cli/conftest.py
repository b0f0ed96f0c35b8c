"""Commands in this process: a new one imports torch again, which takes seconds."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distca.runtime.interrupts import STOP_SIGNALS


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """Restores the handlers of signals, which commands set for the rest of their process."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def only_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of the only rank that torchrun has started."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    world = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in world.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def as_rank(
    only_rank: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Any]:
    """``distca train`` in this process, as the only rank that torchrun has started."""
    import torch
    from cli.test_train import TINY

    from distca.cli import main

    monkeypatch.setenv("COLUMNS", "100")

    def call(out: Path, *args: str, status: int = 0) -> tuple[str, str]:
        with pytest.raises(SystemExit) as exited:
            main(["train", f"--out={out}", *(f"--set={s}" for s in TINY), *args])
        said = capsys.readouterr()
        assert exited.value.code == status, said.err
        return said.out, said.err

    yield call
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
