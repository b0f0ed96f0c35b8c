"""Sources of documents: each has a number of documents and reads any of them by its index.

=======================  ======================================================================
``stdlib``               the text of Python's standard library on this machine: a data set that
                         is always available, with documents of very uneven length
``pretrain``, ...        random tokens with lengths from a distribution of ``data.lengths``
a folder                 all ``.txt`` files below it, one document each
``docs/**/*.md``         a glob: every file that matches, each by its own suffix
``text.jsonl``           one document a line: ``text``; or ``prompt`` and ``completion``, where
                         only the completion has a loss; or ``tokens`` or ``input_ids``
``tokens.npy``           token ids, divided after each eos or by ``tokens.lengths.npy``
``data.bin, data.idx``   a Megatron indexed data set
any other file           one document of UTF-8 text
=======================  ======================================================================
"""

import sysconfig
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np

from distca.data.documents import Document
from distca.data.lengths import FORMS, LengthDistribution, distribution, names_distribution
from distca.data.readers import check_not_empty, find_files, parse_json, read_lines, whole_numbers
from distca.data.token_files import check_ids, open_megatron, open_numpy
from distca.data.tokenizers import Tokenizer

KNOWN = (
    "stdlib, a text, .jsonl, .npy, .bin or .idx file, a folder of .txt files, a glob, or a"
    f" distribution: {FORMS}"
)
NUM_SYNTHETIC = 1 << 16  # documents in an epoch of random ones
_NOT_TEXT = {".jsonl", ".npy", ".bin", ".idx", ".json"}
# Tests are odd text, and installed packages are not the standard library.
_NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


class Source(Protocol):
    """A data set. ``document(index)`` always returns the same document, which may be empty."""

    name: str
    files: Sequence[Path]  # whose contents it depends on

    def __len__(self) -> int: ...

    def document(self, index: int) -> Document: ...


class TextFiles:
    """Text files with one document each."""

    def __init__(self, name: str, paths: Sequence[Path], tokenizer: Tokenizer) -> None:
        self.name = name
        self.files, self._tokenizer = paths, tokenizer

    def __len__(self) -> int:
        return len(self.files)

    def document(self, index: int) -> Document:
        path = self.files[index]
        try:
            text = path.read_bytes().decode("utf-8")
        except OSError as error:
            raise ValueError(f"{path} can no longer be read: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{path} is not UTF-8 text (byte {error.start}): convert or remove it"
            ) from None
        return self._tokenizer.document(text, index=index)


class JsonLines:
    """A file with one document per line; only the start of each line is kept in memory."""

    def __init__(self, path: Path, tokenizer: Tokenizer) -> None:
        self.name = str(path)
        self.files: Sequence[Path] = (path,)
        self._tokenizer = tokenizer
        lines = [(number, offset) for number, offset, _ in read_lines(path)]
        check_not_empty(lines, path)
        self._lines = np.array(lines, np.int64)  # [documents, 2]: number and offset of a line

    def __len__(self) -> int:
        return len(self._lines)

    def document(self, index: int) -> Document:
        number, offset = self._lines[index].tolist()
        with self.files[0].open("rb") as file:
            file.seek(offset)
            line = file.readline()
        where = f"line {number} of {self.name}"
        match parse_json(line, where):
            case {"prompt": str(prompt), "completion": str(completion)}:
                return self._tokenizer.document(completion, prompt=prompt, index=index)
            case {"text": str(text)}:
                return self._tokenizer.document(text, index=index)
            case {"tokens": list(ids)} | {"input_ids": list(ids)}:
                tokens = whole_numbers(ids, lambda place: f"token {place} of {where}")
                check_ids(tokens, self._tokenizer.vocab_size, where)
                return Document.from_tokens(ids, index=index)
        raise ValueError(
            f'{where} is not a document: it needs "text", or "prompt" and "completion" (strings),'
            ' or "tokens" or "input_ids" (a list)'
        )


class Synthetic:
    """Random tokens that depend only on the seed and the index of the document."""

    files: Sequence[Path]

    def __init__(
        self, lengths: LengthDistribution, num_documents: int, vocab_size: int, seed: int
    ) -> None:
        self.name, self.files = lengths.name, ()
        self._lengths, self._num_documents = lengths, num_documents
        self._vocab_size, self._seed = vocab_size, seed

    def __len__(self) -> int:
        return self._num_documents

    def document(self, index: int) -> Document:
        rng = np.random.default_rng([self._seed, index])
        length = int(self._lengths.sample(1, rng)[0])
        return Document.from_tokens(rng.integers(0, self._vocab_size, length), index=index)


class Joined:
    """Several sources as one, in order."""

    def __init__(self, name: str, sources: Sequence[Source]) -> None:
        self.name = name
        self._sources = sources
        self.files: Sequence[Path] = [file for source in sources for file in source.files]
        self._stops = np.cumsum([len(source) for source in sources])

    def __len__(self) -> int:
        return int(self._stops[-1])

    def document(self, index: int) -> Document:
        number = int(np.searchsorted(self._stops, index, side="right"))
        start = int(self._stops[number - 1]) if number else 0
        return replace(self._sources[number].document(index - start), index=index)


def standard_library(tokenizer: Tokenizer) -> TextFiles:
    root = Path(sysconfig.get_path("stdlib"))
    found = {path.relative_to(root).as_posix(): path for path in root.rglob("*.py")}
    paths = [
        found[name]
        for name in sorted(found)
        if _NOT_LIBRARY.isdisjoint(name.split("/")) and found[name].stat().st_size
    ]
    if not paths:  # frozen and zipped installations
        raise ValueError(f"{root} holds no Python source: use your own text instead of stdlib")
    return TextFiles("stdlib", paths, tokenizer)


def open_source(
    where: str | Path,
    tokenizer: Tokenizer,
    *,
    context: int,
    seed: int = 0,
    end_of_document: int | None = None,
) -> Source:
    """Opens a source; see the top of this file.

    The first document is read at once, so that a wrong file or tokenizer is reported before a run
    begins.

    context, seed: for random tokens.
    end_of_document: the id that ends documents in a ``.npy`` file; by default the tokenizer's eos.
    """
    source = _open(where, tokenizer, context, seed, end_of_document)
    source.document(0)
    return source


def _open(
    where: str | Path, tokenizer: Tokenizer, context: int, seed: int, end: int | None
) -> Source:
    if where == "stdlib":
        return standard_library(tokenizer)
    if names_distribution(str(where)):
        lengths = distribution(str(where), context)
        return Synthetic(lengths, NUM_SYNTHETIC, tokenizer.vocab_size, seed)
    files = find_files(where, KNOWN)
    if not any(file.suffix in _NOT_TEXT for file in files):
        return TextFiles(str(where), files, tokenizer)
    sources = [_open_file(file, tokenizer, end) for file in files]
    return sources[0] if len(sources) == 1 else Joined(str(where), sources)


def _open_file(path: Path, tokenizer: Tokenizer, end: int | None) -> Source:
    match path.suffix:
        case ".jsonl":
            return JsonLines(path, tokenizer)
        case ".npy":
            return open_numpy(path, tokenizer, end)
        case ".bin" | ".idx":
            return open_megatron(path, tokenizer)
        case ".json":
            raise ValueError(f"{path} is JSON: write one document per line to a .jsonl file")
    return TextFiles(str(path), [path], tokenizer)
