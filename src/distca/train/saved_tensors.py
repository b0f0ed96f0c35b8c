"""What a checkpoint says about its tensors, which is checked before it is trusted with memory."""

import math
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from distca.train.safe_reader import SafeReader
from distca.train.step_folders import COMPLETE, DamagedCheckpointError

MODEL, OPTIMIZER = "model.", "optimizer."  # with which the names of tensors begin


def saved_sizes(path: Path) -> dict[str, torch.Size]:
    """Returns the sizes of the tensors of a checkpoint by name.

    Raises DamagedCheckpointError unless all of them are float32, and completely there.
    """
    try:
        metadata = SafeReader(path).read_metadata()
    except Exception as error:  # unpickling may raise anything
        raise damaged_metadata(path, first_sentence(error)) from None
    saved, stored = metadata.state_dict_metadata, metadata.storage_data
    if not isinstance(saved, dict) or not isinstance(stored, dict):
        raise damaged_metadata(path, "it does not list tensors and their files")
    try:
        _check_places(stored)
        return {name: _size(name, entry, stored) for name, entry in saved.items()}
    except ValueError as error:
        raise damaged_metadata(path, str(error)) from None


def damaged_metadata(path: Path, why: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        f"{path / COMPLETE} is damaged ({why}): load an earlier checkpoint"
    )


def first_sentence(error: BaseException) -> str:
    """Returns the first sentence of an error, or its kind if it has no words."""
    return next(iter(str(error).splitlines()), "").partition(". ")[0] or type(error).__name__


def _check_places(stored: dict[Any, Any]) -> None:
    """Raises ValueError unless each chunk has a place of its own in a file."""
    places = set()
    for info in stored.values():
        match info:
            case _StorageInfo(relative_path=str() as file, offset=int() as offset, length=int()):
                places.add((file, offset))
            case _:
                raise ValueError("it has a chunk that is in no file")
    if len(places) != len(stored):
        raise ValueError("it has two chunks in one place")


def _size(name: Any, entry: Any, stored: dict[Any, Any]) -> torch.Size:
    """Returns the size of a tensor. Raises ValueError unless chunks in files cover it."""
    if not isinstance(name, str) or not name.startswith((MODEL, OPTIMIZER)):
        raise ValueError(f"{name!r} is neither of the model nor of the optimizer")
    match entry:
        case TensorStorageMetadata(
            properties=TensorProperties(dtype=torch.float32),
            size=torch.Size() as size,
            chunks=list() as chunks,
        ):
            filled = [chunk for chunk in chunks if _elements(name, chunk, size)]
        case _:
            raise ValueError(f"{name} is not described as a float32 tensor in chunks")
    places = {chunk.offsets for chunk in filled}
    covered = sum(math.prod(chunk.sizes) for chunk in filled)
    if covered != math.prod(size) or len(places) != len(filled):
        raise ValueError(f"the chunks of {name} do not cover it")
    if any(MetadataIndex(name, place) not in stored for place in places):
        raise ValueError(f"{name} has a chunk that is in no file")
    return size


def _elements(name: str, chunk: Any, whole: torch.Size) -> int:
    """Returns the number of elements of a chunk. Raises ValueError unless it is in its tensor."""
    match chunk:
        case ChunkStorageMetadata(offsets=torch.Size() as starts, sizes=torch.Size() as sizes) if (
            len(starts) == len(sizes) == len(whole)
            and all(
                start >= 0 and size >= 0 and start + size <= most
                for start, size, most in zip(starts, sizes, whole, strict=True)
            )
        ):
            return math.prod(sizes)
    raise ValueError(f"a chunk of {name} is outside of it")
