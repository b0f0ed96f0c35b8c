"""What a checkpoint says about its tensors is checked before it is used."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import state_dict_saver

from distca.train.digests import DigestWriter, check_digests
from distca.train.saved_tensors import SavedChunk, saved_sizes, saved_tensors
from distca.train.step_folders import COMPLETE, EXTRA, DamagedCheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
NAME, OTHER = "model.w", "optimizer.w.exp_avg"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "step-00000003"
    path.mkdir()
    (path / EXTRA).write_text("{}")
    state = {NAME: torch.randn(4, 3), OTHER: torch.tensor(7.0), "optimizer.v": torch.zeros(0, 3)}
    state_dict_saver.save(state, storage_writer=DigestWriter(path), no_dist=True)
    return path


Change = Callable[[dict[str, Any]], object]


def of_tensor(**values: Any) -> Change:
    return lambda saved: saved[NAME].update(values)


def of_chunk(**values: Any) -> Change:
    return lambda saved: saved[NAME]["chunks"][0].update(values)


def renamed(name: str) -> Change:
    return lambda saved: saved.update({name: saved.pop(NAME)})


def replaced(entry: Any) -> Change:
    return lambda saved: saved.update({NAME: entry})


def in_one_place(saved: dict[str, Any]) -> None:
    first, second = (saved[name]["chunks"][0] for name in (NAME, OTHER))
    second |= {"file": first["file"], "start": first["start"]}


def twice(saved: dict[str, Any]) -> None:
    (chunk,) = saved[NAME]["chunks"]
    half = chunk | {"size": [2, 3]}
    saved[NAME]["chunks"] = [half, half | {"start": 1 << 20}]


NOT_A_TENSOR = rf"{NAME} is not described as a tensor in chunks"
UNPLACED = f"a chunk of {NAME} is not described by its place"
NUMBER = f"{NAME} has a size or place that is no whole number"
OUTSIDE = f"a chunk of {NAME} is outside of it"
UNCOVERED = f"the chunks of {NAME} do not cover it"
ELSEWHERE = f"a chunk of {NAME} is in no file of this folder"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (renamed("other"), "'other' is neither of the model nor of the optimizer"),
        (replaced(3), NOT_A_TENSOR),
        (replaced({}), NOT_A_TENSOR),
        (of_tensor(size=None), NOT_A_TENSOR),
        (of_tensor(size="x"), NOT_A_TENSOR),
        (of_tensor(size=[1 << 40, 3]), UNCOVERED),
        (of_tensor(size=[1 << 70, 3]), NUMBER),
        (of_tensor(size=[-4, 3]), NUMBER),
        (of_tensor(size=[4.0, 3]), NUMBER),
        (of_tensor(size=[True, 3]), NUMBER),
        (of_tensor(size=[12]), OUTSIDE),
        (of_tensor(chunks=None), NOT_A_TENSOR),
        (of_tensor(chunks=[]), UNCOVERED),
        (of_tensor(chunks=[None]), UNPLACED),
        (twice, UNCOVERED),
        (of_chunk(offset=[1, 0]), OUTSIDE),
        (of_chunk(offset=[-1, 0]), NUMBER),
        (of_chunk(offset=[0]), OUTSIDE),
        (of_chunk(size=[4, 2]), UNCOVERED),
        (of_chunk(size=None), UNPLACED),
        (of_chunk(start="x"), UNPLACED),
        (of_chunk(start=-1), ELSEWHERE),
        (of_chunk(length=None), UNPLACED),
        (of_chunk(length=-1), ELSEWHERE),
        (of_chunk(file=3), UNPLACED),
        (of_chunk(file=""), ELSEWHERE),
        (of_chunk(file=".."), ELSEWHERE),
        (of_chunk(file="../other/__0_0.distcp"), ELSEWHERE),
        (of_chunk(file="/etc/passwd"), ELSEWHERE),
        (in_one_place, "it has two chunks in one place"),
    ],
)
def test_what_is_not_as_it_was_written_is_damage(
    folder: Path, tmp_path: Path, change: Change, words: str
) -> None:
    saved = json.loads((folder / COMPLETE).read_text())
    change(saved)
    (tmp_path / COMPLETE).write_text(json.dumps(saved))
    with pytest.raises(DamagedCheckpointError) as raised:
        saved_sizes(tmp_path)
    assert str(raised.value).startswith(f"{tmp_path}/.metadata is damaged (")
    assert re.search(rf"{words}.*\): load an earlier checkpoint", str(raised.value))


@pytest.mark.parametrize(
    "text",
    [b"", b"?", b"[1, 2]", b"\x80\x04}.", b"[" * 100_000, b"9" * 10_000, b"\xff\xfe{}"],
    ids=["empty", "torn", "list", "pickle", "deep", "long number", "not text"],
)
def test_what_is_no_description_is_damage(tmp_path: Path, text: bytes) -> None:
    (tmp_path / COMPLETE).write_bytes(text)
    with pytest.raises(DamagedCheckpointError, match=r"\.metadata is damaged \(\w.*\): load an"):
        saved_sizes(tmp_path)


def test_a_file_that_is_missing_or_a_pipe_is_damage(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    file = tmp_path / "copy" / saved_tensors(folder)[NAME].chunks[0].file
    file.unlink()
    with pytest.raises(DamagedCheckpointError, match=rf"its file {file.name} is missing"):
        saved_sizes(file.parent)
    os.mkfifo(file)
    with pytest.raises(DamagedCheckpointError, match=rf"its file {file.name} is missing"):
        saved_sizes(file.parent)
    with pytest.raises(DamagedCheckpointError, match=rf"{file.name} is damaged"):
        check_digests(file.parent, 0, 1)


def test_sizes_and_places_come_back(folder: Path) -> None:
    sizes = {NAME: torch.Size([4, 3]), OTHER: torch.Size([]), "optimizer.v": torch.Size([0, 3])}
    assert saved_sizes(folder) == sizes
    saved = saved_tensors(folder)
    assert saved["optimizer.v"].chunks == []
    (chunk,) = saved[NAME].chunks
    assert chunk == SavedChunk(torch.Size([0, 0]), sizes[NAME], *chunk[2:])
    file = folder / chunk.file
    assert 0 < chunk.length <= file.stat().st_size - chunk.start
