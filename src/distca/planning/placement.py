"""Placements: which worker holds which tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from distca.planning.document_masks import DocumentMasks
from distca.planning.entries import BELOW, Entry, Facts, lengths_of, listed, read_entry
from distca.planning.prefixes import Prefixes
from distca.planning.spans import Ints, Spans, as_ints, cover_error, cumulative
from distca.planning.two_way import TwoWaySpans


class Shard(NamedTuple):
    """Tokens [start, stop) of a document that live on one worker."""

    worker: int
    document: int
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class Placement:
    """Shards on workers, such that every token of every document is placed exactly once.

    Shards are sorted by worker, and on each worker they are in the order of its packed tensors. A
    document may *span* workers: then each of them holds some of its shards and their keys.
    """

    lengths: Ints  # [documents] with a prefix that belongs to another document
    document: Ints  # [shards]
    start: Ints  # [shards]
    stop: Ints  # [shards]
    worker: Ints  # [shards]
    num_workers: int
    prefixes: Prefixes = None  # type: ignore[assignment]  # none by default
    two_way: TwoWaySpans = field(default_factory=TwoWaySpans.none)
    row: Ints = field(init=False)  # [shards] first row of the shard in its worker's tensors
    tokens: Ints = field(init=False)  # [workers]

    def __post_init__(self) -> None:
        if self.prefixes is None:
            object.__setattr__(self, "prefixes", Prefixes.none(len(self.lengths)))
        size = self.stop - self.start
        self._validate(size)
        tokens = np.bincount(self.worker, size, minlength=self.num_workers).astype(np.int64)
        offset = cumulative(size)[:-1] - np.repeat(
            cumulative(tokens)[:-1], np.bincount(self.worker, minlength=self.num_workers)
        )
        object.__setattr__(self, "row", offset)
        object.__setattr__(self, "tokens", tokens)

    @classmethod
    def from_shards(
        cls,
        lengths: Ints | None,
        shards: Sequence[Shard] | Ints,
        num_workers: int,
        prefixes: Prefixes | None = None,
        two_way: TwoWaySpans | None = None,
    ) -> Placement:
        """Builds a placement from shards, whose order on each worker is kept.

        lengths: that of each document; None: where its last shard stops.
        """
        table = as_ints(shards).reshape(-1, 4)
        if lengths is None:
            lengths = np.zeros(int(table[:, 1].max(initial=-1)) + 1, np.int64)
            np.maximum.at(lengths, table[:, 1], table[:, 3])
        worker, document, start, stop = table[np.argsort(table[:, 0], kind="stable")].T
        document, start, stop, worker = (one.copy() for one in (document, start, stop, worker))
        prefixes = prefixes or Prefixes.none(len(lengths))
        two_way = two_way or TwoWaySpans.none()
        return cls(lengths, document, start, stop, worker, num_workers, prefixes, two_way)

    @classmethod
    def from_ranks(cls, ranks: Sequence[Iterable[Entry]]) -> Placement:
        """Builds a placement from the documents of each rank, as a trainer has them.

        A number is the length of a whole document. ``{"document": d, "start": s, "stop": e}`` is a
        shard; shards with the same ``d`` belong to the same document. Documents are numbered in
        order of appearance. ``{"length": n, "parent": p, "prefix": m}`` is a whole document of n
        tokens that continues the first m tokens of document number p; a shard may have a parent,
        too, and then its positions count from the beginning of the prefix. Documents and shards may
        have two-way spans, ``"two_way": [[a, b], ...]``, as positions of the document.
        """
        ranks = listed(ranks, "what the ranks hold", "lists of documents, one for each rank")
        if not ranks:
            raise ValueError("there are no ranks at all: give one list of documents for each rank")
        tables: list[Ints] = []
        numbers: dict[int, int] = {}  # of documents that are given as shards
        facts: dict[int, Facts] = {}  # by document
        count = 0  # documents so far
        for worker, given in enumerate(ranks):
            entries = listed(given, f"rank {worker}", "documents")
            table = np.zeros((len(entries), 4), np.int64)
            if (lengths := lengths_of(entries)) is not None:
                table[:, 1], table[:, 3] = np.arange(count, count + len(entries)), lengths
                count += len(entries)
            else:
                for index, entry in enumerate(entries):
                    where = f"entry {index} of rank {worker}"
                    name, start, stop, found = read_entry(entry, where)
                    document = count if name is None else numbers.setdefault(name, count)
                    count = max(count, document + 1)
                    table[index, 1:] = document, start, stop
                    if facts.setdefault(document, found) != found:
                        raise ValueError(
                            f"{where} has {found}, and another shard of the same document has"
                            f" {facts[document]}: give all of its shards the same ones"
                        )
            table[:, 0] = worker
            tables.append(table)
        prefixes = Prefixes.none(count)
        for document, found in facts.items():
            prefixes.parent[document], prefixes.length[document] = found.parent, found.prefix
        two_way = TwoWaySpans.of({d: found.two_way for d, found in facts.items() if found.two_way})
        return cls.from_shards(None, np.concatenate(tables), len(ranks), prefixes, two_way)

    @classmethod
    def in_order(
        cls,
        lengths: Ints,
        num_workers: int,
        prefixes: Prefixes | None = None,
        two_way: TwoWaySpans | None = None,
    ) -> Placement:
        """Packs documents in order of arrival; the tokens of two workers differ by one at most.

        A document that does not fit on a worker continues on the next one.
        """
        prefixes = prefixes or Prefixes.none(len(lengths))
        tokens = lengths - prefixes.length
        ends = np.cumsum(tokens, dtype=np.int64)
        total = int(ends[-1]) if len(ends) else 0
        worker_ends = np.arange(1, num_workers, dtype=np.int64) * total // num_workers
        boundaries = np.unique(np.concatenate([np.zeros(1, np.int64), ends, worker_ends]))
        first, last = boundaries[:-1], boundaries[1:]
        document = np.searchsorted(ends, first, side="right")
        begin = ends - lengths  # so that positions count from the beginning of the prefix
        return cls(
            lengths,
            document,
            first - begin[document],
            last - begin[document],
            np.searchsorted(worker_ends, first, side="right"),
            num_workers,
            prefixes,
            two_way or TwoWaySpans.none(),
        )

    @property
    def num_documents(self) -> int:
        return len(self.lengths)

    def shards(self) -> list[Shard]:
        """Returns the shards as records, in the order of the arrays."""
        columns = (self.worker, self.document, self.start, self.stop)
        return [Shard(*row) for row in zip(*(c.tolist() for c in columns), strict=True)]

    @cached_property
    def by_document(self) -> Ints:
        """Indices of the shards, sorted by (document, start)."""
        return np.lexsort((self.start, self.document))

    @cached_property
    def spans(self) -> Spans:
        """Shards in the order of ``by_document``, grouped by document; they cover each document."""
        order = self.by_document
        return Spans(self.document[order], self.start[order], self.stop[order])

    def masks(self, reach: Ints) -> DocumentMasks:
        """Returns which keys the queries of each document see. reach: [documents]"""
        return DocumentMasks(self.lengths, reach, self.two_way)

    def home(self, document: Ints, position: Ints) -> Ints:
        """Returns the worker that holds each token."""
        return self.worker[self.shard_of(document, position)]

    def row_of(self, document: Ints, position: Ints) -> Ints:
        """Returns the row of each token in its worker's packed tensors."""
        shard = self.shard_of(document, position)
        return self.row[shard] + position - self.start[shard]

    def shard_of(self, document: Ints, position: Ints) -> Ints:
        """Returns the index of the shard that holds each token."""
        spans = self.spans
        stride = int(self.lengths.max(initial=0)) + 1
        first = spans.group * stride + spans.start
        found = np.searchsorted(first, document * stride + position, side="right") - 1
        return self.by_document[found]

    def _validate(self, size: Ints) -> None:
        if self.num_workers < 1:
            raise ValueError(f"{self.num_workers} workers: a placement needs at least one")
        if np.any(self.lengths < 1):
            bad = int(np.argmin(self.lengths))
            raise ValueError(f"document {bad} has {self.lengths[bad]} tokens: it needs >= 1")
        if np.any(self.lengths >= BELOW):
            bad = int(np.argmax(self.lengths))
            raise ValueError(
                f"document {bad} has {self.lengths[bad]} tokens: it needs fewer than {BELOW}"
            )
        if np.any(size < 1):
            bad = int(np.argmin(size))
            raise ValueError(
                f"document {self.document[bad]} has an empty shard"
                f" [{self.start[bad]}, {self.stop[bad]}): stop must be above start"
            )
        if np.any(np.diff(self.worker) < 0) or np.any(self.worker >= self.num_workers):
            raise ValueError(
                f"shards must be sorted by worker, and workers must be below {self.num_workers}"
            )
        if np.any(self.document < 0) or np.any(self.document >= len(self.lengths)):
            raise ValueError(
                f"a shard belongs to document {self.document.max()}, but there are only"
                f" {len(self.lengths)}: documents are numbered from 0"
            )
        self.prefixes.validate(self.lengths)
        self.two_way.validate(self.lengths, self.prefixes)
        wrong = cover_error(self.spans, self.prefixes.length, self.lengths)
        if wrong:
            raise ValueError(f"{wrong}: every token must be placed exactly once")
