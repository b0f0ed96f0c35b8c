"""Megatron data sets, field by field as their writer does it."""

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np


def write_index(
    path: Path,
    sequences: list[int],
    borders: list[int],
    *,
    magic: bytes = b"MMIDIDX\x00\x00",
    version: int = 1,
    code: int = 8,
    token_bytes: int = 2,
    modes: bool = False,
) -> Path:
    offsets = np.cumsum([0, *sequences[:-1]])[: len(sequences)] * token_bytes
    with path.open("wb") as file:
        file.write(magic + struct.pack("<Q", version) + struct.pack("<B", code))
        file.write(struct.pack("<Q", len(sequences)) + struct.pack("<Q", len(borders)))
        file.write(np.array(sequences, np.int32).tobytes())
        file.write(np.array(offsets, np.int64).tobytes())
        file.write(np.array(borders, np.int64).tobytes())
        if modes:
            file.write(np.zeros(len(sequences), np.int8).tobytes())
    return path


def write_data_set(path: Path, documents: Sequence[list[int]], code: int, dtype: str) -> Path:
    """``path`` is the .bin; each document is one sequence."""
    sizes = [len(document) for document in documents]
    path.write_bytes(b"".join(np.array(document, dtype).tobytes() for document in documents))
    write_index(
        path.with_suffix(".idx"),
        sizes,
        list(range(len(sizes) + 1)),
        code=code,
        token_bytes=np.dtype(dtype).itemsize,
    )
    return path
