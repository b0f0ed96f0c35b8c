"""Checkpoints are read without executing what they contain."""

import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from train.bodies import Command

from distca.train.safe_reader import SafePlanner, SafeReader

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def save(folder: Path) -> dict[str, Any]:
    state = {
        "model.w": torch.randn(4, 3),
        "optimizer.w.exp_avg": torch.randn(5, dtype=torch.bfloat16),
        "optimizer.w.step": 7,
    }
    state_dict_saver.save(state, storage_writer=FileSystemWriter(folder), no_dist=True)
    return state


def load(folder: Path) -> dict[str, Any]:
    state = {
        "model.w": torch.zeros(4, 3),
        "optimizer.w.exp_avg": torch.zeros(5, dtype=torch.bfloat16),
        "optimizer.w.step": None,
    }
    state_dict_loader.load(
        state, storage_reader=SafeReader(folder), planner=SafePlanner(), no_dist=True
    )
    return state


def test_tensors_and_numbers_come_back(tmp_path: Path) -> None:
    saved, loaded = save(tmp_path), load(tmp_path)
    assert loaded["optimizer.w.step"] == 7
    for name in ("model.w", "optimizer.w.exp_avg"):
        assert torch.equal(saved[name], loaded[name])


def test_metadata_that_runs_a_command_is_refused(tmp_path: Path) -> None:
    folder, marker = tmp_path / "checkpoint", tmp_path / "executed"
    save(folder)
    (folder / ".metadata").write_bytes(pickle.dumps(Command(marker)))
    with pytest.raises(pickle.UnpicklingError, match=r"it names \w+.mkdir"):
        SafeReader(folder).read_metadata()
    assert not marker.exists()
    with pytest.raises(AttributeError):  # torch's own reader fails, but only after it ran
        FileSystemReader(folder).read_metadata()
    assert marker.exists()


def test_a_value_that_runs_a_command_is_refused(tmp_path: Path) -> None:
    folder, marker = tmp_path / "checkpoint", tmp_path / "executed"
    save(folder)
    metadata = SafeReader(folder).read_metadata()
    assert metadata.storage_data is not None
    (index,) = (one for one in metadata.storage_data if one.fqn == "optimizer.w.step")
    info = metadata.storage_data[index]
    crafted = io.BytesIO()
    torch.save(Command(marker), crafted)
    (folder / "crafted.distcp").write_bytes(crafted.getvalue())
    info.relative_path, info.offset, info.length = "crafted.distcp", 0, crafted.tell()
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(BaseException, match=r"weights_only|Weights only"):
        load(folder)
    assert not marker.exists()


@pytest.mark.parametrize("path", ["../other/__0_0.distcp", "/etc/passwd"])
def test_files_outside_the_checkpoint_are_refused(tmp_path: Path, path: str) -> None:
    save(tmp_path)
    metadata = SafeReader(tmp_path).read_metadata()
    assert metadata.storage_data is not None
    next(iter(metadata.storage_data.values())).relative_path = path
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(pickle.UnpicklingError, match="another folder"):
        SafeReader(tmp_path).read_metadata()


def test_something_else_than_metadata_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps([1, 2]))
    with pytest.raises(pickle.UnpicklingError, match="it holds list, not metadata"):
        SafeReader(tmp_path).read_metadata()
