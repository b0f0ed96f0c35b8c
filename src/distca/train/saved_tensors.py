"""What a checkpoint says about its tensors, in ``.metadata``, which is checked before it is used.

    {"model.norm.weight": {"size": [8], "chunks": [
        {"offset": [0], "size": [4], "file": "__0_0.distcp", "start": 0, "length": 1320},
        {"offset": [4], "size": [4], "file": "__1_0.distcp", "start": 0, "length": 1320}]}, ...}

torch.distributed.checkpoint would pickle this, and unpickling can run any command; JSON cannot. All
tensors are float32.
"""

import json
import math
from collections.abc import Iterable
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from distca.train.step_folders import COMPLETE, DamagedCheckpointError

MODEL, OPTIMIZER = "model.", "optimizer."  # with which the names of tensors begin


class SavedChunk(NamedTuple):
    """A part of a tensor, and where it lies: ``length`` bytes of a file from ``start``."""

    offset: torch.Size
    size: torch.Size
    file: str
    start: int
    length: int


class SavedTensor(NamedTuple):
    size: torch.Size
    chunks: list[SavedChunk]


def describe(metadata: Metadata, written: Iterable[WriteResult]) -> str:
    """Returns the text for tensors that have been written."""
    places = {one.index: one.storage_data for one in written}
    tensors: dict[str, dict[str, Any]] = {}
    for name, tensor in metadata.state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata), f"{name} is not a tensor"
        assert tensor.properties.dtype == torch.float32, f"{name} is {tensor.properties.dtype}"
        chunks = []
        for chunk in tensor.chunks:
            if math.prod(chunk.sizes):  # some ranks have an empty part
                place = places[MetadataIndex(name, chunk.offsets)]
                where = place.relative_path, place.offset, place.length
                chunks.append(SavedChunk(chunk.offsets, chunk.sizes, *where)._asdict())
        tensors[name] = {"size": tensor.size, "chunks": chunks}
    return json.dumps(tensors)


def saved_tensors(path: Path) -> dict[str, SavedTensor]:
    """Returns the tensors of a checkpoint by name.

    Raises DamagedCheckpointError unless chunks of their own cover each of them.
    """
    try:
        saved = json.loads((path / COMPLETE).read_text(errors="replace"))
        if not isinstance(saved, dict):
            raise ValueError("it does not list tensors")
        tensors = {name: _tensor(name, entry) for name, entry in saved.items()}
        places = [
            (chunk.file, chunk.start) for tensor in tensors.values() for chunk in tensor.chunks
        ]
        if len(set(places)) != len(places):
            raise ValueError("it has two chunks in one place")
        # A pipe would be read without end.
        if missing := {file for file, _ in places if not (path / file).is_file()}:
            raise ValueError(f"its file {min(missing)} is missing")
    except json.JSONDecodeError:
        why = "it is not the JSON that this version of distca writes"
        raise damaged_metadata(path, why) from None
    except (OSError, ValueError, RecursionError) as error:
        raise damaged_metadata(path, first_sentence(error)) from None
    return tensors


def saved_sizes(path: Path) -> dict[str, torch.Size]:
    """Returns the sizes of the tensors of a checkpoint by name; raises as ``saved_tensors``."""
    return {name: tensor.size for name, tensor in saved_tensors(path).items()}


def as_metadata(tensors: dict[str, SavedTensor]) -> Metadata:
    """Returns what torch.distributed.checkpoint reads tensors by."""
    properties = TensorProperties(dtype=torch.float32)
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    places = {}
    for name, (size, chunks) in tensors.items():
        parts = [ChunkStorageMetadata(chunk.offset, chunk.size) for chunk in chunks]
        described[name] = TensorStorageMetadata(properties, size, parts)
        for chunk in chunks:
            where = _StorageInfo(chunk.file, chunk.start, chunk.length)
            places[MetadataIndex(name, chunk.offset)] = where
    return Metadata(described, storage_data=places)


def damaged_metadata(path: Path, why: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        f"{path / COMPLETE} is damaged ({why}): load an earlier checkpoint"
    )


def first_sentence(error: BaseException) -> str:
    """Returns the first sentence of an error, or its kind if it has no words."""
    return next(iter(str(error).splitlines()), "").partition(". ")[0] or type(error).__name__


def _tensor(name: str, entry: Any) -> SavedTensor:
    """Returns a tensor as it was read. Raises ValueError unless its chunks cover it."""
    if not name.startswith((MODEL, OPTIMIZER)):
        raise ValueError(f"{name!r} is neither of the model nor of the optimizer")
    match entry:
        case {"size": list() as size, "chunks": list() as chunks}:
            whole = _size(name, size)
            found = [_chunk(name, chunk, whole) for chunk in chunks]
        case _:
            raise ValueError(f"{name} is not described as a tensor in chunks")
    covered = sum(math.prod(chunk.size) for chunk in found)
    if covered != math.prod(whole) or len({chunk.offset for chunk in found}) != len(found):
        raise ValueError(f"the chunks of {name} do not cover it")
    return SavedTensor(whole, found)


def _chunk(name: str, entry: Any, whole: torch.Size) -> SavedChunk:
    """Returns a chunk as it was read. Raises ValueError unless it is in its tensor and a file."""
    match entry:
        case {
            "offset": list() as offset,
            "size": list() as size,
            "file": str() as file,
            "start": int() as start,
            "length": int() as length,
        }:
            chunk = SavedChunk(_size(name, offset), _size(name, size), file, start, length)
        case _:
            raise ValueError(f"a chunk of {name} is not described by its place")
    ends = [first + count for first, count in zip(chunk.offset, chunk.size, strict=False)]
    inside = all(end <= most for end, most in zip(ends, whole, strict=False))
    if not (inside and len(chunk.offset) == len(chunk.size) == len(whole)):
        raise ValueError(f"a chunk of {name} is outside of it")
    if PurePath(file).name != file or file in ("", "..") or start < 0 or length < 0:
        raise ValueError(f"a chunk of {name} is in no file of this folder")
    return chunk


def _size(name: str, numbers: list[Any]) -> torch.Size:
    if all(type(number) is int and 0 <= number < 1 << 63 for number in numbers):
        return torch.Size(numbers)
    raise ValueError(f"{name} has a size or place that is no whole number")
