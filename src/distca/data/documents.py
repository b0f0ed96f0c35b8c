"""Documents as tokens and labels, and batches of them.

A label is the next token of the same document, so that a document may be cut anywhere and its
pieces trained on in any place: the last label of a piece is still the true next token. Positions
are not kept: they count from 0 in every document of a batch, pieces included.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from distca.data.lengths import Lengths

Tokens = npt.NDArray[np.int64]

IGNORE = -100  # the label of what must not be learnt; what torch's cross entropy leaves out


@dataclass(frozen=True, eq=False)
class Document:
    """A document or a piece of one, and where it comes from."""

    tokens: Tokens  # [n]
    labels: Tokens  # [n] the next token, or IGNORE
    source: int = 0  # the source's number in its loader
    index: int = 0  # in the source
    offset: int = 0  # of the first token, in the document as the source has it

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
        """A whole document; its first ``num_prompt`` tokens are read but not learnt."""
        tokens = np.asarray(tokens, dtype=np.int64)
        labels = np.append(tokens[1:], IGNORE) if len(tokens) else tokens.copy()
        labels[: max(num_prompt - 1, 0)] = IGNORE  # token i is the label of token i - 1
        return cls(tokens, labels, source, index)

    def piece(self, start: int, stop: int) -> Document:
        """Tokens [start, stop), counted from this piece's own first."""
        return replace(
            self,
            tokens=self.tokens[start:stop],
            labels=self.labels[start:stop],
            offset=self.offset + start,
        )

    def pieces(self, longest: int) -> list[Document]:
        """All of it in order, none longer than ``longest``."""
        return [self.piece(start, start + longest) for start in range(0, len(self), longest)]


@dataclass(frozen=True, eq=False)
class Batch:
    """What one step learns from, on all ranks together."""

    documents: tuple[Document, ...]

    @cached_property
    def lengths(self) -> Lengths:
        return np.array([len(document) for document in self.documents], dtype=np.int64)

    @cached_property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    @cached_property
    def num_targets(self) -> int:
        """Labels that are learnt: what the step's loss is divided by."""
        return sum(int(np.count_nonzero(d.labels != IGNORE)) for d in self.documents)
