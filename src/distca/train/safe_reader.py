"""Reads checkpoints with torch.distributed.checkpoint, without executing what they contain.

Its own reader unpickles ``.metadata``, so a crafted checkpoint could run any command. That of
distca is JSON (``train.saved_tensors``). Tensors are read with ``weights_only``, as torch does.
docs/security.md says what is trusted.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem

from distca.train.saved_tensors import as_metadata, saved_tensors


class SafeReader(FileSystemReader):
    """Raises DamagedCheckpointError if a checkpoint describes anything else than its tensors."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return as_metadata(saved_tensors(Path(self.path)))


class ShownPlanner(DefaultLoadPlanner):
    """Tells how much has been read.

    show: called with the bytes of each piece of a tensor.
    """

    def __init__(self, show: Callable[[int], None] = lambda num_bytes: None) -> None:
        super().__init__()
        self._show = show

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        super().commit_tensor(read_item, tensor)
        self._show(tensor.nbytes)
