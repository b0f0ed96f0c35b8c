"""Documents from memory-mapped files of token ids: ``.npy`` or Megatron ``.bin``."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from distca.data.documents import Document
from distca.data.lengths import Lengths
from distca.data.readers import check_not_empty, open_array, read_index, read_lengths
from distca.data.tokenizers import Tokenizer

Row = npt.NDArray[np.integer[Any]]


class TokenFile:
    """An array of token ids on disk that is divided into documents of the given lengths."""

    def __init__(
        self, path: Path, row: Row, lengths: Lengths, vocab_size: int, *beside: Path
    ) -> None:
        self.name = str(path)
        self.files: Sequence[Path] = (path, *beside)
        self._row, self._vocab_size = row, vocab_size
        self._stops = np.cumsum(lengths)
        if self._stops[-1] != len(row):
            raise ValueError(
                f"{path} holds {len(row)} tokens but its documents {int(self._stops[-1])}: lengths"
                " and tokens must be from the same data set"
            )

    def __len__(self) -> int:
        return len(self._stops)

    def document(self, index: int) -> Document:
        start = int(self._stops[index - 1]) if index else 0
        tokens = np.asarray(self._row[start : int(self._stops[index])], dtype=np.int64)
        check_ids(tokens, self._vocab_size, f"document {index} of {self.name}")
        return Document.from_tokens(tokens, index=index)


def open_numpy(path: Path, tokenizer: Tokenizer, end_of_document: int | None = None) -> TokenFile:
    """Opens ``tokens.npy``, divided by ``tokens.lengths.npy`` if it exists, else after each eos."""
    row, beside = open_array(path), path.with_suffix(".lengths.npy")
    if end_of_document is None and beside.is_file():
        return TokenFile(path, row, read_lengths(beside), tokenizer.vocab_size, beside)
    end = tokenizer.eos if end_of_document is None else end_of_document
    if end is None:
        raise ValueError(
            f"{path} does not say where its documents end: write their lengths to {beside.name}"
            " next to it, or give the id that ends them"
        )
    return TokenFile(path, row, read_lengths(path, end_of_document=end), tokenizer.vocab_size)


def open_megatron(path: Path, tokenizer: Tokenizer) -> TokenFile:
    """Opens a Megatron data set by the path of its ``.bin`` or ``.idx`` file."""
    path = path.with_suffix(".bin")
    beside = path.with_suffix(".idx")
    index = read_index(beside)
    if not path.is_file():
        raise ValueError(f"{path} does not exist: an .idx needs its .bin next to it")
    if index.dtype.kind not in "iu" or not index.in_order:
        raise ValueError(
            f"{path} holds {index.dtype} tokens, {'in' if index.in_order else 'not in'} order:"
            " only whole numbers in the order of the index are supported; write the data set again"
        )
    check_not_empty(index.lengths, path)
    row: Row = np.memmap(path, index.dtype, mode="r")
    return TokenFile(path, row, index.lengths, tokenizer.vocab_size, beside)


def check_ids(tokens: npt.NDArray[Any], vocab_size: int, where: str) -> None:
    bad = np.flatnonzero((tokens < 0) | (tokens >= vocab_size))
    if len(bad):
        raise ValueError(
            f"token {int(bad[0])} of {where} is {int(tokens[bad[0]])} but the vocabulary has"
            f" {vocab_size}: set the tokenizer that the tokens were made with"
        )
