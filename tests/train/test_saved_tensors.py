"""What a checkpoint says about its tensors is checked before it is used."""

import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from distca.train.saved_tensors import saved_sizes
from distca.train.step_folders import DamagedCheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
NAME = "model.w"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved")
    state = {NAME: torch.randn(4, 3), "optimizer.w.step": torch.tensor(7.0)}
    state_dict_saver.save(state, storage_writer=FileSystemWriter(path), no_dist=True)
    return path


def of_entry(**values: Any) -> Callable[[Any], None]:
    """Changes attributes of the entry of a tensor; None deletes one."""

    def change(metadata: Any) -> None:
        entry = metadata.state_dict_metadata[NAME]
        for name, value in values.items():
            delattr(entry, name) if value is None else setattr(entry, name, value)

    return change


def of_chunk(**values: Any) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        for name, value in values.items():
            setattr(metadata.state_dict_metadata[NAME].chunks[0], name, value)

    return change


def of_place(**values: Any) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        for name, value in values.items():
            setattr(next(iter(metadata.storage_data.values())), name, value)

    return change


def of_metadata(**values: Any) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        for name, value in values.items():
            setattr(metadata, name, value)

    return change


def of_dtype(dtype: Any) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        metadata.state_dict_metadata[NAME].properties.dtype = dtype

    return change


def renamed(key: Any, entry: Any = None) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        old = metadata.state_dict_metadata.pop(NAME)
        metadata.state_dict_metadata[key] = old if entry is None else entry

    return change


def in_one_place(metadata: Any) -> None:
    first, second = metadata.storage_data.values()
    second.relative_path, second.offset = first.relative_path, first.offset


NOT_A_TENSOR = rf"{NAME} is not described as a float32 tensor in chunks"
UNLISTED = "it does not list tensors and their files"
OUTSIDE = f"a chunk of {NAME} is outside of it"
UNCOVERED = f"the chunks of {NAME} do not cover it"
IN_NO_FILE = "a chunk that is in no file"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (of_metadata(state_dict_metadata=None), UNLISTED),
        (of_metadata(state_dict_metadata=[]), UNLISTED),
        (of_metadata(storage_data=None), UNLISTED),
        (of_metadata(storage_data={}), IN_NO_FILE),
        (of_metadata(storage_data={3: 4}), "no attribute 'relative_path'"),
        (renamed(3), "3 is neither of the model nor of the optimizer"),
        (renamed("other"), "'other' is neither of the model nor of the optimizer"),
        (renamed("model.v"), IN_NO_FILE),
        (renamed(NAME, BytesStorageMetadata()), NOT_A_TENSOR),
        (renamed(NAME, 3), NOT_A_TENSOR),
        (of_entry(size=None), NOT_A_TENSOR),
        (of_entry(size="x"), NOT_A_TENSOR),
        (of_entry(properties=None), NOT_A_TENSOR),
        (of_entry(properties=3), NOT_A_TENSOR),
        (of_entry(chunks=None), NOT_A_TENSOR),
        (of_entry(chunks=[]), UNCOVERED),
        (of_entry(chunks=[None]), OUTSIDE),
        (of_entry(size=torch.Size([1 << 40, 3])), UNCOVERED),
        (of_entry(size=torch.Size([-4, 3])), OUTSIDE),
        (of_entry(size=torch.Size([12])), OUTSIDE),
        (of_dtype(torch.int8), NOT_A_TENSOR),
        (of_dtype(None), NOT_A_TENSOR),
        (of_chunk(offsets=torch.Size([1, 0])), OUTSIDE),
        (of_chunk(offsets=torch.Size([-1, 0])), OUTSIDE),
        (of_chunk(sizes=torch.Size([4, 2])), UNCOVERED),
        (of_chunk(sizes=None), OUTSIDE),
        (of_place(offset="x"), IN_NO_FILE),
        (of_place(length=None), IN_NO_FILE),
        (of_place(relative_path=3), r"\.metadata is damaged \("),
        (in_one_place, "it has two chunks in one place"),
    ],
)
def test_what_is_not_as_it_was_written_is_damage(
    folder: Path, tmp_path: Path, change: Callable[[Any], None], words: str
) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(DamagedCheckpointError) as raised:
        saved_sizes(tmp_path)
    assert str(raised.value).startswith(f"{tmp_path}/.metadata is damaged (")
    assert re.search(rf"{words}.*\): load an earlier checkpoint", str(raised.value))


def test_sizes_come_back(folder: Path) -> None:
    assert saved_sizes(folder) == {NAME: torch.Size([4, 3]), "optimizer.w.step": torch.Size([])}
