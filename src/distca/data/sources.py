"""Sources of documents: each has a number of documents and reads any of them by its index.

=======================  ======================================================================
``stdlib``               the text of Python's standard library on this machine: a data set that
                         is always available, with documents of very uneven length
``pretrain``, ...        random tokens with lengths from a distribution of ``data.lengths``
a folder                 all ``.txt`` files below it, one document each
``docs/**/*.md``         a glob: every file that matches, each by its own suffix
``text.jsonl``           one document a line: ``text``; or ``prompt`` and ``completion``, where
                         only the completion has a loss; or ``prompt`` and ``completions``
                         (``trees``), which share the prompt; or ``tokens`` or ``input_ids``
``tokens.npy``           token ids, divided after each eos or by ``tokens.lengths.npy``
``data.bin, data.idx``   a Megatron indexed data set
any other file           one document of UTF-8 text
=======================  ======================================================================
"""

import os
import sysconfig
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from distca.data import readers
from distca.data.documents import Document, Source, Tree
from distca.data.length_names import FORMS, names_distribution
from distca.data.lengths import LengthDistribution, Lengths, distribution
from distca.data.tokenizers import Tokenizer
from distca.data.trees import read_tree

KNOWN = (
    "stdlib, a text, .jsonl, .npy, .bin or .idx file, a folder of .txt files, a glob, or a"
    f" distribution: {FORMS}"
)
NUM_SYNTHETIC = 1 << 16  # documents in an epoch of random ones
_NOT_TEXT = {".jsonl", ".npy", ".bin", ".idx", ".json"}
# Tests are odd text, and installed packages are not the standard library.
_NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def _text_files(name: str, paths: Sequence[Path], tokenizer: Tokenizer) -> Source:
    """Returns a source of text files with one document each."""

    def document(index: int) -> Document:
        path = paths[index]
        try:
            text = path.read_bytes().decode("utf-8")
        except OSError as error:
            raise ValueError(f"{path} can no longer be read: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{path} is not UTF-8 text (byte {error.start}): convert or remove it"
            ) from None
        return tokenizer.document(text, index=index)

    return Source(name, len(paths), document, paths)


def _json_lines(path: Path, tokenizer: Tokenizer) -> Source:
    """Returns a source with one document per line, of which only the starts are kept in memory."""
    found = [(number, offset) for number, offset, _ in readers.read_lines(path)]
    readers.check_not_empty(found, path)
    lines = np.array(found, np.int64)  # [documents, 2]: number and offset of a line

    def document(index: int) -> Document | Tree:
        number, offset = lines[index].tolist()
        with path.open("rb") as file:
            file.seek(offset)
            found = file.readline()
        where = f"line {number} of {path}"
        match readers.parse_json(found, where):
            case {"completions": _} as line:
                return read_tree(line, tokenizer, where, index)
            case {"prompt": str(prompt), "completion": str(completion)}:
                return tokenizer.document(completion, prompt=prompt, index=index)
            case {"text": str(text)}:
                return tokenizer.document(text, index=index)
            case {"tokens": list(ids)} | {"input_ids": list(ids)}:
                tokens = readers.whole_numbers(ids, lambda place: f"token {place} of {where}")
                tokenizer.check_ids(tokens, where)
                return Document.from_tokens(ids, index=index)
        raise ValueError(
            f'{where} is not a document: it needs "text", or "prompt" and "completion" (strings),'
            ' or "completions" (a list), or "tokens" or "input_ids" (a list)'
        )

    return Source(str(path), len(lines), document, (path,))


def _token_file(
    path: Path,
    row: npt.NDArray[np.integer[Any]],
    lengths: Lengths,
    tokenizer: Tokenizer,
    *beside: Path,
) -> Source:
    """Returns an array of token ids on disk, divided into documents of the given lengths."""
    stops = np.cumsum(lengths)
    if stops[-1] != len(row):
        raise ValueError(
            f"{path} holds {len(row)} tokens but its documents {int(stops[-1])}: lengths"
            " and tokens must be from the same data set"
        )

    def document(index: int) -> Document:
        start = int(stops[index - 1]) if index else 0
        tokens = np.asarray(row[start : int(stops[index])], dtype=np.int64)
        tokenizer.check_ids(tokens, f"document {index} of {path}")
        return Document.from_tokens(tokens, index=index)

    return Source(str(path), len(stops), document, (path, *beside))


def _numpy_tokens(path: Path, tokenizer: Tokenizer) -> Source:
    """Opens ``tokens.npy``, divided by ``tokens.lengths.npy`` if it exists, else after each eos."""
    row, beside = readers.open_array(path), path.with_suffix(".lengths.npy")
    if beside.is_file():
        return _token_file(path, row, readers.read_lengths(beside), tokenizer, beside)
    if tokenizer.eos is None:
        raise ValueError(
            f"{path} does not say where its documents end: write their lengths to {beside.name}"
            " next to it, or set data.eos to the token that ends them"
        )
    lengths = readers.read_lengths(path, end_of_document=tokenizer.eos)
    return _token_file(path, row, lengths, tokenizer)


def _megatron_tokens(path: Path, tokenizer: Tokenizer) -> Source:
    """Opens a Megatron data set by the path of its ``.bin`` or ``.idx`` file."""
    path = path.with_suffix(".bin")
    beside = path.with_suffix(".idx")
    index = readers.read_index(beside)
    if not path.is_file():
        raise ValueError(f"{path} does not exist: an .idx needs its .bin next to it")
    if index.dtype.kind not in "iu" or not index.in_order:
        raise ValueError(
            f"{path} holds {index.dtype} tokens, {'in' if index.in_order else 'not in'} order:"
            " only whole numbers in the order of the index are supported; write the data set again"
        )
    readers.check_not_empty(index.lengths, path)
    tokens = np.memmap(path, index.dtype, mode="r")
    return _token_file(path, tokens, index.lengths, tokenizer, beside)


def _random_tokens(lengths: LengthDistribution, vocab_size: int, seed: int) -> Source:
    """Returns a source of tokens that depend only on the seed and the index of the document."""

    def document(index: int) -> Document:
        rng = np.random.default_rng([seed, index])
        length = int(lengths.sample(1, rng)[0])
        return Document.from_tokens(rng.integers(0, vocab_size, length), index=index)

    settings = {"context": lengths.context, "vocab_size": vocab_size}
    return Source(lengths.name, NUM_SYNTHETIC, document, settings=settings)


def _joined(name: str, sources: Sequence[Source]) -> Source:
    """Returns several sources as one, in order."""
    stops = np.cumsum([len(source) for source in sources])

    def document(index: int) -> Document | Tree:
        number = int(np.searchsorted(stops, index, side="right"))
        start = int(stops[number - 1]) if number else 0
        return replace(sources[number].document(index - start), index=index)

    files = [file for source in sources for file in source.files]
    return Source(name, int(stops[-1]), document, files)


def _standard_library(tokenizer: Tokenizer) -> Source:
    root = Path(sysconfig.get_path("stdlib"))
    paths: list[Path] = []
    for folder, folders, names in os.walk(root):
        # What is left out is not searched: packages may have ten times as many files.
        folders[:] = [name for name in folders if name not in _NOT_LIBRARY]
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    paths = sorted((path for path in paths if path.stat().st_size), key=Path.as_posix)
    if not paths:  # frozen and zipped installations
        raise ValueError(f"{root} holds no Python source: use your own text instead of stdlib")
    return _text_files("stdlib", paths, tokenizer)


def open_source(where: str | Path, tokenizer: Tokenizer, *, context: int, seed: int = 0) -> Source:
    """Opens a source; see the top of this file.

    The first document is read at once, so that a wrong file or tokenizer is reported before a run
    begins.

    context, seed: for random tokens.
    """
    source = _open(where, tokenizer, context, seed)
    source.document(0)
    return source


def _open(where: str | Path, tokenizer: Tokenizer, context: int, seed: int) -> Source:
    if where == "stdlib":
        return _standard_library(tokenizer)
    if names_distribution(str(where)):
        return _random_tokens(distribution(str(where), context), tokenizer.vocab_size, seed)
    files = readers.find_files(where, KNOWN)
    if not any(file.suffix in _NOT_TEXT for file in files):
        return _text_files(str(where), files, tokenizer)
    sources = [_open_file(file, tokenizer) for file in files]
    return sources[0] if len(sources) == 1 else _joined(str(where), sources)


def _open_file(path: Path, tokenizer: Tokenizer) -> Source:
    match path.suffix:
        case ".jsonl":
            return _json_lines(path, tokenizer)
        case ".npy":
            return _numpy_tokens(path, tokenizer)
        case ".bin" | ".idx":
            return _megatron_tokens(path, tokenizer)
        case ".json":
            raise ValueError(f"{path} is JSON: write one document per line to a .jsonl file")
    return _text_files(str(path), [path], tokenizer)
