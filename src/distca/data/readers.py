"""Document lengths from files: JSON, text, JSON lines, and tokenized data sets. No torch needed.

=====================  ========================================================================
``lengths.json``       a list of lengths, or ``{"lengths": [...]}``
``text.txt``           one document, whose length is its size in bytes (a byte-level tokenizer)
a folder               all ``.txt`` files below it, in order of their paths
``shards/*.jsonl``     a glob: every file that matches, each by its own suffix, in order of paths
``text.jsonl``         one document per line: ``text`` (utf-8 bytes), ``tokens`` or ``input_ids``
                       (their number) or ``length``
``tokens.npy``         token ids in which ``end_of_document`` ends each document; without that
                       id, the array holds lengths
``data.bin, data.idx`` a Megatron indexed data set; only the ``.idx`` is read
=====================  ========================================================================
"""

import glob
import json
import struct
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from distca.data.lengths import Lengths

LONGEST = 1 << 27  # tokens of a document; longer ones may overflow 64-bit picoseconds
_SECOND = {".bin": ".idx", ".npy": ".lengths.npy"}  # files that belong to another file
FILES = "a .json, .jsonl, .txt, .npy, .bin or .idx file, a folder of .txt files"
KNOWN = f"{FILES} or a glob"


def read_lengths(
    source: str | Path, *, end_of_document: int | None = None, known: str = KNOWN
) -> Lengths:
    """Returns the lengths of all documents in ``source``; see the top of this file.

    known: the supported sources, for the error message when nothing is found.
    """
    path = Path(source)
    if end_of_document is not None and path.suffix != ".npy":
        raise ValueError(
            f"{path} with an end-of-document id: only .npy files have one; leave it out"
        )
    files = find_files(source, known)
    if files != [path]:
        return np.concatenate([read_lengths(file) for file in files])
    match path.suffix:
        case ".json":
            lengths = _read_json_lengths(path)
        case ".jsonl":
            lengths = _read_json_lines(path)
        case ".txt":
            lengths = _checked([path.stat().st_size], lambda _: str(path))
        case ".npy":
            lengths = _read_numpy(path, end_of_document)
        case ".bin" | ".idx":
            lengths = read_index(path.with_suffix(".idx")).lengths
        case _:
            raise ValueError(f"{path} has an unknown suffix: give {KNOWN}")
    check_not_empty(lengths, path)
    return lengths


def check_not_empty(documents: Sized, path: Path) -> None:
    if not len(documents):
        raise ValueError(f"{path} holds no documents: it needs one or more")


def read_json(path: Path) -> Any:
    return parse_json(path.read_bytes(), str(path))


def parse_json(text: bytes, where: str) -> Any:
    """Returns the value of a JSON text; ``where`` names the text in the error message."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON: {error}") from None


def find_files(source: str | Path, known: str) -> list[Path]:
    """Returns a file, the ``.txt`` files below a folder, or the matches of a glob, sorted.

    ``data.idx`` is left out if ``data.bin`` is found too, and ``tokens.lengths.npy`` if
    ``tokens.npy`` is.

    known: the supported sources, for the error message when nothing is found.
    """
    if not str(source):  # such as an unset variable of a shell; a path would be this folder
        raise ValueError(f"'' names no file: give {known}")
    path = Path(source)
    found: Iterable[Path]
    if path.is_file():
        return [path]
    if path.is_dir():
        found, missing = path.rglob("*.txt"), f"folder {path} holds no .txt file"
    elif glob.has_magic(str(source)):
        found = map(Path, glob.iglob(str(source), recursive=True))
        missing = f"no file matches {source}"
    elif path.exists():
        raise ValueError(f"{path} is a pipe or a device: give {known}")
    else:
        raise ValueError(f"{path} does not exist: give {known}")
    files = {file for file in found if file.is_file()}
    if not files:
        raise ValueError(f"{missing}: give {known}")
    seconds = {file.with_suffix(second) for file in files if (second := _SECOND.get(file.suffix))}
    return sorted(files - seconds)


def read_lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Yields the number, the offset and the text of each line of a file that is not blank."""
    offset = 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield number, offset, line
            offset += len(line)


def _read_json_lengths(path: Path) -> Lengths:
    data = read_json(path)
    values = data.get("lengths") if isinstance(data, dict) else data
    if not isinstance(values, list):
        raise ValueError(
            f'{path} holds neither a list of lengths nor {{"lengths": [...]}}: write one of them'
        )
    return _checked(values, lambda index: f"length {index} in {path}")


def _read_json_lines(path: Path) -> Lengths:
    lengths = {
        number: _length_of(line, f"line {number} of {path}") for number, _, line in read_lines(path)
    }
    numbers = list(lengths)
    return _checked(
        list(lengths.values()), lambda index: f"the document on line {numbers[index]} of {path}"
    )


def _length_of(line: bytes, where: str) -> Any:
    match parse_json(line, where):
        case {"text": str(text)}:
            return len(text.encode("utf-8", errors="surrogatepass"))
        case {"tokens": list(tokens)} | {"input_ids": list(tokens)}:
            return len(tokens)
        case {"length": length}:
            return length
    raise ValueError(
        f'{where} is not a document: it needs "text" (a string), "tokens" or "input_ids" (a list)'
        ' or "length" (a number)'
    )


def open_array(path: Path) -> npt.NDArray[np.integer[Any]]:
    """Returns the memory-mapped array of whole numbers in a ``.npy`` file."""
    try:
        array = np.lib.format.open_memmap(path, mode="r")  # ``np.load`` opens archives too
    except OSError:
        raise
    except Exception as error:  # numpy evaluates the header, and passes on whatever that raises
        raise ValueError(f"{path} is not a plain numpy array: {error}") from None
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(
            f"{path} holds an array of shape {array.shape} and type {array.dtype}:"
            " it must be a one-dimensional array of whole numbers"
        )
    row: npt.NDArray[np.integer[Any]] = array
    return row


def _read_numpy(path: Path, end_of_document: int | None) -> Lengths:
    array = open_array(path)
    if end_of_document is None:
        why = "(read as lengths, since no end-of-document id is given)"
        return _checked(array, lambda index: f"entry {index} of {path} {why}")
    stops = np.flatnonzero(array == end_of_document) + 1
    if not len(stops):
        raise ValueError(
            f"{path} does not contain token {end_of_document}: give the id that ends its documents"
        )
    if stops[-1] < len(array):  # the last document has no end
        stops = np.append(stops, len(array))
    return np.diff(stops, prepend=0).astype(np.int64)


# [Note: Megatron index] Little-endian: magic, version (u64), code of the tokens' type (u8), number
# of sequences S (u64) and of document borders D (u64); then S lengths (i32) in tokens, S offsets
# (i64) into the .bin in bytes, and D borders (i64): document d is sequences [border d, border d+1),
# so there are D - 1 documents. Multimodal sets append S modes (i8), which are not needed here.
_HEADER = struct.Struct("<9sQBQQ")
_MAGIC = b"MMIDIDX\x00\x00"
_TOKEN_TYPES = dict(enumerate(("u1", "i1", "<i2", "<i4", "<i8", "<f8", "<f4", "<u2"), 1))


@dataclass(frozen=True, eq=False)
class Index:
    """The contents of a Megatron ``.idx`` file, which describes a ``.bin`` file."""

    dtype: np.dtype[Any]  # of a token
    lengths: Lengths  # [documents] in tokens
    in_order: bool  # sequences follow each other in the .bin without gaps


def read_index(path: Path) -> Index:
    """Reads an ``.idx`` file; see [Note: Megatron index]."""
    if not path.is_file():
        raise ValueError(f"{path} does not exist: a .bin data set needs its .idx next to it")
    with path.open("rb") as file:
        head = file.read(_HEADER.size)
    if len(head) < _HEADER.size or not head.startswith(_MAGIC):
        raise ValueError(f"{path} is not a Megatron index: it must begin with MMIDIDX")
    _, version, code, num_sequences, num_borders = _HEADER.unpack(head)
    if version != 1 or code not in _TOKEN_TYPES:
        raise ValueError(
            f"{path} is a Megatron index of version {version} and token type {code}:"
            " only version 1 and types 1 to 8 are supported"
        )
    size, needed = path.stat().st_size, _HEADER.size + 12 * num_sequences + 8 * num_borders
    if size < needed:
        raise ValueError(
            f"{path} is truncated: {num_sequences} sequences and {num_borders} document borders"
            f" need {needed} bytes, but it has {size}"
        )
    sequences = np.fromfile(path, "<i4", num_sequences, offset=_HEADER.size)
    offsets = np.fromfile(path, "<i8", num_sequences, offset=_HEADER.size + 4 * num_sequences)
    borders = np.fromfile(path, "<i8", num_borders, offset=_HEADER.size + 12 * num_sequences)
    rising = bool(np.all(np.diff(borders) >= 0))
    if not (num_borders and borders[0] == 0 and borders[-1] == num_sequences and rising):
        raise ValueError(
            f"{path} is damaged: its document borders must increase from 0 to {num_sequences}"
            " sequences"
        )
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(sequences, dtype=np.int64)])
    lengths = _checked(np.diff(ends[borders]), lambda index: f"document {index} in {path}")
    dtype = np.dtype(_TOKEN_TYPES[code])
    in_order = bool(np.array_equal(offsets, ends[:-1] * dtype.itemsize))
    return Index(dtype, lengths, in_order)


def _checked(
    values: list[Any] | npt.NDArray[np.integer[Any]], where: Callable[[int], str]
) -> Lengths:
    """Returns checked lengths; ``where(index)`` names a wrong one in the error message."""
    row = values if isinstance(values, np.ndarray) else whole_numbers(values, where)
    bad = np.flatnonzero((row < 1) | (row >= LONGEST))
    if len(bad):
        raise ValueError(
            f"{where(int(bad[0]))} has {int(row[bad[0]])} tokens: a document has at least 1 and"
            f" fewer than {LONGEST}"
        )
    return row.astype(np.int64)


def whole_numbers(values: list[Any], where: Callable[[int], str]) -> npt.NDArray[Any]:
    """Returns whole numbers of JSON as objects, since they may be too large for other arrays."""
    for index, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"{where(index)} is {value!r}: it must be a whole number")
    return np.array(values, dtype=object)
