"""Writing the files of a checkpoint where the disk does not take them."""

from __future__ import annotations

import errno
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import filesystem, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from distca.train.digests import DigestWriter

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
]


@pytest.fixture(params=[1 << 16, 3 << 20], ids=["64 KiB", "3 MiB"])
def small_files(request: pytest.FixtureRequest) -> Iterator[None]:
    """Files of this process are not larger."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (request.param, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_takes_no_more_says_why(tmp_path: Path, small_files: None) -> None:
    """torch alone loses the error in one of its threads, or tells a position in a file."""
    state = {f"model.{name}": torch.randn(1 << 20) for name in range(8)}
    with pytest.raises(CheckpointException) as raised:
        state_dict_saver.save(state, storage_writer=DigestWriter(tmp_path), no_dist=True)
    (cause, _) = raised.value.failures[0]
    assert isinstance(cause, OSError)
    assert cause.errno == errno.EFBIG


def test_tensors_that_a_thread_did_not_write_are_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(threading.Thread):
        """A thread that ends with an error, which torch does not look at."""

        def run(self) -> None:
            raise RuntimeError("enforce fail")

    monkeypatch.setattr(filesystem.threading, "Thread", Failing)
    monkeypatch.setattr(filesystem, "_write_files_from_queue", lambda *_, **__: None)
    state = {"model.w": torch.randn(4)}
    with pytest.raises(CheckpointException) as raised:
        state_dict_saver.save(state, storage_writer=DigestWriter(tmp_path), no_dist=True)
    assert "a thread that writes has failed" in str(raised.value.failures[0][0])
