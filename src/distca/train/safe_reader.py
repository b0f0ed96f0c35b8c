"""Reads checkpoints of torch.distributed.checkpoint without executing anything that they contain.

Its own reader unpickles ``.metadata`` and every value that is not a tensor without restrictions, so
a crafted checkpoint could run any command. Here a pickle may name the classes that describe tensors
and nothing else, and values are plain numbers. docs/security.md says what is trusted.
"""

import io
import pickle
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

# What torch.distributed.checkpoint writes to ``.metadata``. Dtypes of torch are added below.
_ALLOWED = {
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "WindowsPath"},
    "torch": {"Size"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.serialization": {"_get_layout"},
}


class SafeReader(FileSystemReader):
    """Reads a checkpoint; raises ``pickle.UnpicklingError`` if it names anything else than tensors.

    Tensors themselves are read with ``weights_only``, as the base class does.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        folder = Path(self.path)
        with (folder / ".metadata").open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"it holds {type(metadata).__name__}, not metadata")
        for info in (metadata.storage_data or {}).values():
            if PurePath(info.relative_path).name != info.relative_path:
                raise pickle.UnpicklingError(f"it refers to {info.relative_path}, another folder")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class SafePlanner(DefaultLoadPlanner):
    """Loads values that are not tensors with ``weights_only``, into a state dict without levels.

    show: called with the bytes of each piece of a tensor that has been read.
    """

    def __init__(self, show: Callable[[int], None] = lambda num_bytes: None) -> None:
        super().__init__()
        self._show = show

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        super().commit_tensor(read_item, tensor)
        self._show(tensor.nbytes)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.original_state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint of distca has")
