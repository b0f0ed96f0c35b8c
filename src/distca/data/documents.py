"""Documents as tokens and labels, and batches of documents.

A label is the next token of the same document. So a document may be cut anywhere: the last label of
a piece is still the true next token. Positions are not stored; they count from 0 in every document
of a batch, and in every piece. A document of a tree begins behind its prefix, which is stored with
the document before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from distca.data.lengths import Lengths

Tokens = npt.NDArray[np.int64]

IGNORE = -100  # the label of tokens without a loss, as in torch's cross entropy


@dataclass(frozen=True, eq=False)
class Document:
    """A document or a piece of one, with its origin."""

    tokens: Tokens  # [n]
    labels: Tokens  # [n] the next token, or IGNORE
    source: int = 0  # number of the source in its loader
    index: int = 0  # number of the document in its source
    offset: int = 0  # position of the first token in the source's document
    prefix: int = 0  # tokens that come before, and are the first of the document before it

    def __post_init__(self) -> None:
        assert self.tokens.ndim == 1
        assert self.tokens.shape == self.labels.shape
        assert self.tokens.dtype == self.labels.dtype == np.int64

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def from_tokens(
        cls, tokens: npt.ArrayLike, *, num_prompt: int = 0, source: int = 0, index: int = 0
    ) -> Document:
        """Returns a whole document, of which the first ``num_prompt`` tokens have no loss."""
        tokens = np.asarray(tokens, dtype=np.int64)
        labels = np.append(tokens[1:], IGNORE) if len(tokens) else tokens.copy()
        labels[: max(num_prompt - 1, 0)] = IGNORE  # token i is the label of token i - 1
        return cls(tokens, labels, source, index)

    def piece(self, start: int, stop: int) -> Document:
        """Returns tokens [start, stop), counted from the first token of this piece."""
        return replace(
            self,
            tokens=self.tokens[start:stop],
            labels=self.labels[start:stop],
            offset=self.offset + start,
        )

    def pieces(self, longest: int) -> list[tuple[Document, ...]]:
        """Returns the document in pieces of at most ``longest`` tokens, each by itself."""
        return [(self.piece(start, start + longest),) for start in range(0, len(self), longest)]

    @property
    def longest_row(self) -> int:
        return len(self)


@dataclass(frozen=True, eq=False)
class Tree:
    """Rows that begin alike, as documents of which each may continue the one before it.

    A tree is never cut: all of its documents are in the same batch.
    """

    documents: tuple[Document, ...]
    source: int = 0  # number of the source in its loader
    index: int = 0  # number of the tree in its source
    offset: int = 0  # as that of a document

    def __len__(self) -> int:
        return sum(map(len, self.documents))

    @property
    def tokens(self) -> Tokens:
        return np.concatenate([document.tokens for document in self.documents])

    @property
    def labels(self) -> Tokens:
        return np.concatenate([document.labels for document in self.documents])

    @property
    def longest_row(self) -> int:
        """The number of tokens of the longest row, with its prefix."""
        return max(document.prefix + len(document) for document in self.documents)

    def piece(self, start: int, stop: int) -> Tree:
        assert (start, stop) == (0, len(self))
        return self

    def pieces(self, _: int) -> list[tuple[Document, ...]]:
        """Returns the only piece."""
        return [self.documents]


@dataclass(frozen=True, eq=False)
class Source:
    """A data set. ``document(index)`` always returns the same document, which may be empty.

    files, settings: what documents depend on, besides the tokenizer and the seed of a run.
    """

    name: str
    num_documents: int
    document: Callable[[int], Document | Tree]
    files: Sequence[Path] = ()
    settings: Mapping[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return self.num_documents


@dataclass(frozen=True, eq=False)
class Batch:
    """The documents of one step, over all ranks."""

    documents: tuple[Document, ...]

    @cached_property
    def prefixes(self) -> Lengths:
        """The tokens that each document shares with the one before it."""
        return np.array([document.prefix for document in self.documents], dtype=np.int64)

    @cached_property
    def lengths(self) -> Lengths:
        """The tokens of each document, with its prefix."""
        own = np.array([len(document) for document in self.documents], dtype=np.int64)
        return own + self.prefixes

    @cached_property
    def num_tokens(self) -> int:
        return int((self.lengths - self.prefixes).sum())

    @property
    def num_saved(self) -> int:
        """The number of tokens that are not computed, because documents share them."""
        return int(self.prefixes.sum())

    @cached_property
    def num_targets(self) -> int:
        """The number of labels with a loss, by which the loss of the step is divided."""
        return sum(int(np.count_nonzero(d.labels != IGNORE)) for d in self.documents)
