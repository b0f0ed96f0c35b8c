"""Checkpoints are read without executing what they contain."""

import io
import json
import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader
from train.bodies import Command

from distca.train.digests import DigestWriter
from distca.train.safe_reader import SafeReader, ShownPlanner
from distca.train.step_folders import COMPLETE, EXTRA, DamagedCheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
NAMES = ("model.w", "optimizer.w.exp_avg", "optimizer.w.step")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "step-00000003"
    path.mkdir()
    (path / EXTRA).write_text("{}")
    return path


def save(folder: Path) -> dict[str, Tensor]:
    state = dict(zip(NAMES, (torch.randn(4, 3), torch.randn(5), torch.tensor(7.0)), strict=True))
    state_dict_saver.save(dict(state), storage_writer=DigestWriter(folder), no_dist=True)
    return state


def load(folder: Path) -> tuple[dict[str, Tensor], int]:
    """Returns the tensors of a checkpoint, and how many bytes were shown as read."""
    shown: list[int] = []
    state = dict(zip(NAMES, (torch.zeros(4, 3), torch.zeros(5), torch.zeros(())), strict=True))
    state_dict_loader.load(
        state,
        storage_reader=SafeReader(folder),
        planner=ShownPlanner(shown.append),
        no_dist=True,
    )
    return state, sum(shown)


def test_tensors_come_back(folder: Path) -> None:
    saved = save(folder)
    loaded, num_bytes = load(folder)
    assert all(torch.equal(saved[name], loaded[name]) for name in NAMES)
    assert num_bytes == 4 * (4 * 3 + 5 + 1)


def test_metadata_that_runs_a_command_is_refused(folder: Path, tmp_path: Path) -> None:
    save(folder)
    marker = tmp_path / "executed"
    (folder / COMPLETE).write_bytes(pickle.dumps(Command(marker)))
    with pytest.raises(DamagedCheckpointError, match=r"\.metadata is damaged \("):
        SafeReader(folder).read_metadata()
    assert not marker.exists()
    with pytest.raises(AttributeError):  # torch's own reader fails, but only after it ran
        FileSystemReader(folder).read_metadata()
    assert marker.exists()


def test_a_tensor_that_runs_a_command_is_refused(folder: Path, tmp_path: Path) -> None:
    save(folder)
    marker, crafted = tmp_path / "executed", io.BytesIO()
    torch.save(Command(marker), crafted)
    (folder / "crafted.distcp").write_bytes(crafted.getvalue())
    saved = json.loads((folder / COMPLETE).read_text())
    place = {"file": "crafted.distcp", "start": 0, "length": crafted.tell()}
    saved["model.w"]["chunks"][0] |= place
    (folder / COMPLETE).write_text(json.dumps(saved))
    with pytest.raises(BaseException, match=r"weights_only|Weights only"):
        load(folder)
    assert not marker.exists()
