"""Lengths from every kind of file, and a sentence for every kind of damage."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from data.megatron import write_index

from distca.data.readers import read_lengths


@pytest.mark.parametrize("data", [[5, 3, 131072], {"lengths": [5, 3, 131072]}])
def test_json(tmp_path: Path, data: object) -> None:
    path = tmp_path / "lengths.json"
    path.write_text(json.dumps(data))
    assert read_lengths(path).tolist() == [5, 3, 131072]


def test_text_counts_utf8_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("naïve", encoding="utf-8")
    assert read_lengths(tmp_path / "a.txt").tolist() == [6]


def test_a_folder_is_read_in_order_of_paths(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name, size in (("b.txt", 2), ("a.txt", 1), ("sub/c.txt", 3), ("not-text.md", 9)):
        (tmp_path / name).write_text("x" * size)
    assert read_lengths(tmp_path).tolist() == [1, 2, 3]


def test_a_glob_reads_each_file_by_its_kind(tmp_path: Path) -> None:
    (tmp_path / "1.jsonl").write_text('{"length": 7}\n{"length": 8}\n')
    (tmp_path / "2.txt").write_text("abc")
    assert read_lengths(str(tmp_path / "*")).tolist() == [7, 8, 3]
    assert read_lengths(str(tmp_path / "*.jsonl")).tolist() == [7, 8]


def test_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    documents = [{"text": "naïve", "id": 1}, {"tokens": [1, 2]}, {"input_ids": [7]}, {"length": 9}]
    path.write_text("\n\n".join(map(json.dumps, documents)) + "\n")
    assert read_lengths(path).tolist() == [6, 2, 1, 9]


def test_numpy_lengths(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([4, 5, 6], np.uint16))
    lengths = read_lengths(tmp_path / "a.npy")
    assert lengths.tolist() == [4, 5, 6]
    assert lengths.dtype == np.int64


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [([1, 2, 0, 3, 0], [3, 2]), ([1, 2, 0, 3], [3, 1]), ([0, 0], [1, 1])],
)
def test_numpy_tokens(tmp_path: Path, tokens: list[int], expected: list[int]) -> None:
    np.save(tmp_path / "a.npy", np.array(tokens, np.uint16))
    assert read_lengths(tmp_path / "a.npy", end_of_document=0).tolist() == expected


@pytest.mark.parametrize("modes", [False, True])
@pytest.mark.parametrize("suffix", [".idx", ".bin"])
def test_megatron_documents_may_have_several_sequences(
    tmp_path: Path, suffix: str, modes: bool
) -> None:
    write_index(tmp_path / "data.idx", [10, 20, 5, 7], [0, 2, 3, 4], modes=modes)
    (tmp_path / "data.bin").write_bytes(bytes(84))
    assert read_lengths(tmp_path / f"data{suffix}").tolist() == [30, 5, 7]


def test_a_glob_counts_a_data_set_of_two_files_once(tmp_path: Path) -> None:
    write_index(tmp_path / "data.idx", [10, 20], [0, 1, 2])
    (tmp_path / "data.bin").write_bytes(bytes(60))
    (tmp_path / "folder").mkdir()
    assert read_lengths(str(tmp_path / "*")).tolist() == [10, 20]


def npy_header(words: str) -> bytes:
    """Returns an array file without an array."""
    header = f"{{'descr': '<i8', 'fortran_order': False, {words}}}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00v\x00" + header.encode()


BAD_FILES = {
    "c.json": ("{", "c.json is not JSON: "),
    "latin.json": (b"\xff\xfe", "latin.json is not JSON: "),
    "s.json": ('{"x": 1}', 'holds neither a list of lengths nor {"lengths"'),
    "f.json": ("[5, 1.5]", "length 1 in .*f.json is 1.5: it must be a whole number"),
    "t.json": ("[true]", "length 0 in .* is True: it must be a whole number"),
    "z.json": ("[5, 0]", "length 1 in .* has 0 tokens: a document has at least 1"),
    "n.json": ("[-3]", "length 0 in .* has -3 tokens"),
    "h.json": (f"[{10**30}]", "has 10+ tokens: a document has at least 1 and fewer than"),
    "e.json": ("[]", "e.json holds no document"),
    "e.txt": ("", "e.txt has 0 tokens"),
    "e.jsonl": ("\n", "e.jsonl holds no document"),
    "c.jsonl": ('{"length": 1}\n{', "line 2 of .*c.jsonl is not JSON"),
    "x.jsonl": ('{"length": 1}\n\n{"x": 1}', "line 3 of .*x.jsonl is not a document: it needs"),
    "l.jsonl": ("[1, 2]", "line 1 of .*l.jsonl is not a document"),
    "z.jsonl": ('{"length": 1}\n\n{"text": ""}', "the document on line 3 of .* has 0 tokens"),
    "c.npy": (b"oops", "c.npy is not a plain numpy array"),
    "deep.jsonl": ("[" * 100_000, "line 1 of .*deep.jsonl is not JSON"),
    "zip.npy": (b"PK\x03\x04" + bytes(64), "zip.npy is not a plain numpy array"),
    "e.npy": (b"", "e.npy is not a plain numpy array"),
    "big.npy": (npy_header("'shape': (99999999999999999999,), "), "big.npy is not a plain numpy"),
    "open.npy": (npy_header("'shape': ((((("), "open.npy is not a plain numpy array"),
    "lonely.bin": (b"", "lonely.idx does not exist: a .bin data set needs its .idx next to it"),
    "c.idx": (b"MMIDIDX", "c.idx is not a Megatron index"),
    "a.csv": ("1", "a.csv has an unknown suffix: give a .json"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files_are_refused(tmp_path: Path, name: str) -> None:
    content, said = BAD_FILES[name]
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=said):
        read_lengths(tmp_path / name)


@pytest.mark.parametrize(
    ("array", "end", "said"),
    [
        (
            np.ones((2, 2), np.int64),
            None,
            "shape .2, 2. and type int64: it must be a one-dim",
        ),
        (np.ones(2), None, "type float64: it must be a one-dimensional array"),
        (np.array([3, 0]), None, "entry 1 of .* .read as lengths, since no end-of-document"),
        (np.array([3, 0]), 9, "does not contain token 9: give the id that ends its documents"),
    ],
)
def test_bad_arrays_are_refused(
    tmp_path: Path, array: np.ndarray, end: int | None, said: str
) -> None:
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(ValueError, match=said):
        read_lengths(tmp_path / "a.npy", end_of_document=end)


def test_bad_indices_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "data.idx"
    for said, write in {
        "must begin with MMIDIDX": lambda: write_index(path, [1], [0, 1], magic=b"x" * 9),
        "version 2 and token type 8": lambda: write_index(path, [1], [0, 1], version=2),
        "token type 9: only version 1 and types": lambda: write_index(path, [1], [0, 1], code=9),
        "must increase from 0 to 2 sequences": lambda: write_index(path, [1, 1], [0, 1]),
        "must increase from 0 to 1 sequences": lambda: write_index(path, [1], []),
        "document 1 in .* has 0 tokens": lambda: write_index(path, [1, 0], [0, 1, 2]),
        "holds no document": lambda: write_index(path, [], [0]),
        "is truncated: 1 sequences and 2 document borders need 62 bytes, but it has 61": lambda: (
            path.write_bytes(write_index(path, [1], [0, 1]).read_bytes()[:-1])
        ),
    }.items():
        write()
        with pytest.raises(ValueError, match=said):
            read_lengths(path)


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    for source, said in (
        ("x.json", "x.json does not exist: give a .json"),
        ("*.json", "no file matches .*: give"),
        ("", "holds no .txt file: give"),
        ("pipe.json", "pipe.json is a pipe or a device: give a .json"),
    ):
        with pytest.raises(ValueError, match=said):
            read_lengths(str(tmp_path / source))
    with pytest.raises(ValueError, match="'' names no file: give"):
        read_lengths("")  # not the files of this folder
    with pytest.raises(ValueError, match=r"only \.npy files have one; leave it out"):
        read_lengths(tmp_path / "x.json", end_of_document=0)
