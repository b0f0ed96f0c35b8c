"""Global batches from weighted sources, independent of the mesh.

[Note: Order] In every epoch, the documents of a source are in the order of a hash of (seed, source,
epoch, index). The next document comes from the source that is furthest behind its share of the
tokens so far, so no source is ahead of its share by more than one document. A batch takes documents
until it is full; the rest of the last one becomes the first document of the next batch. A tree is
not cut: if it does not fit, the batch stays smaller, and the tree is the first of the next one. So
the state is a cursor for each source and a reference to that rest: a few numbers, from which
exactly the same batches follow. tokens_per_step and context may change when a run is resumed, since
neither the order nor the documents of files depend on them: later documents are cut or dropped by
the new values. Random documents do depend on the context, so it is part of their fingerprint.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from fractions import Fraction
from typing import Any, Literal

import numpy as np

from distca.data.documents import IGNORE, Batch, Document, Source, Tree
from distca.data.fingerprint import change, source_fingerprint
from distca.data.loader_state import Counts, DamagedStateError, LoaderState
from distca.data.shuffle import Ints, choose_held_out, shuffled

Overlong = Literal["split", "drop"]
_SEARCHED = 10_000  # documents in which a target must be found


class Loader:
    """Draws batches of ``tokens_per_step`` tokens, or fewer if a tree does not fit; [Note: Order].

    weights: each source's share of the tokens, in any unit; equal by default.
    overlong: whether a document longer than ``context`` is split into pieces (``"split"``) or left
        out (``"drop"``).
    held_out: the number of documents kept for ``evaluation``, or their share if it is below 1.
    tree_tokens: the most tokens of a tree, by default those of a step.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        tokens_per_step: int,
        context: int,
        seed: int = 0,
        weights: Sequence[float] | None = None,
        overlong: Overlong = "split",
        held_out: float = 0,
        tree_tokens: int | None = None,
    ) -> None:
        if not 1 <= context <= tokens_per_step:
            raise ValueError(
                f"a context of {context} tokens in a step of {tokens_per_step}: set a context of"
                " at least 1 and tokens_per_step >= context"
            )
        if not 0 <= seed < 2**63:
            raise ValueError(f"seed = {seed}: it must be a whole number from 0 to below 2^63")
        if not sources:
            raise ValueError("no sources: give one or more; stdlib is always available")
        self.sources = tuple(sources)
        self.tokens_per_step, self.context, self.seed = tokens_per_step, context, seed
        self.overlong, self.held_out = overlong, held_out
        self._tree_tokens = tokens_per_step if tree_tokens is None else tree_tokens
        self._weights = _whole_weights(weights, self.sources)
        self._sizes = [len(source) for source in self.sources]
        self.fingerprints = [source_fingerprint(source) for source in self.sources]
        self._held_out = choose_held_out(self._sizes, held_out)
        self._trained = [
            np.delete(np.arange(size), held)
            for size, held in zip(self._sizes, self._held_out, strict=True)
        ]
        for source, trained in zip(self.sources, self._trained, strict=True):
            if not len(trained):
                raise ValueError(
                    f"{source.name} has {len(source)} documents, all of them held out: a source"
                    " needs at least one for training; hold out fewer or remove the source"
                )
        self._counts = [Counts.zero() for _ in self.sources]
        self._orders: list[tuple[int, Ints]] = [(-1, trained) for trained in self._trained]
        self._rest: Document | Tree | None = None  # of what the last batch cut, or left out

    @property
    def num_held_out(self) -> int:
        return sum(map(len, self._held_out))

    def next_batch(self) -> Batch:
        """Returns the next batch, with at most ``tokens_per_step`` tokens."""
        documents: list[Document] = []
        missing = self.tokens_per_step
        while missing:
            document = self._draw() if self._rest is None else self._rest
            if isinstance(document, Tree):
                if (stop := len(document)) > missing:
                    self._rest = document
                    break
                documents += document.documents
                self._rest = None
            else:
                stop = min(len(document), self.context, missing)
                documents.append(document.piece(0, stop))
                self._rest = document.piece(stop, len(document)) if stop < len(document) else None
            self._counts[document.source].tokens += stop
            missing -= stop
        return Batch(tuple(documents))

    def check_targets(self) -> None:
        """Raises ValueError for a source without any target among its first documents."""
        for number, trained in enumerate(self._trained):
            found = (self._read(number, index) for index in trained[:_SEARCHED].tolist())
            usable = (document for document in found if not self._is_dropped(document))
            if not any((document.labels != IGNORE).any() for document in usable):
                raise ValueError(
                    f"the documents of {self.sources[number].name} have no target within the"
                    f" context of {self.context} tokens: a target is the next token of the same"
                    " document, so documents need two tokens or more, and a completion after a"
                    " prompt"
                )

    def evaluation(self, num_tokens: int) -> Iterator[Batch]:
        """Yields the held-out documents in order, in pieces of at most ``context`` tokens.

        A batch has at most ``num_tokens`` tokens, and fewer where the next piece does not fit. The
        batches for training do not change.
        """
        if num_tokens < self.context:
            raise ValueError(
                f"evaluation in batches of {num_tokens} tokens with a context of {self.context}:"
                " a batch must hold a document of that length"
            )
        return in_batches(self._evaluated(), self.context, num_tokens)

    def check_evaluation(self, num_tokens: int) -> None:
        """Raises ValueError if the first ``num_tokens`` held-out tokens have no target."""
        searched = 0
        for document in self._evaluated():
            if (document.labels != IGNORE).any():
                return
            searched += len(document)
            if searched >= num_tokens:
                break
        raise ValueError(
            f"the first {searched} tokens of held-out documents have no target within the context"
            f" of {self.context} tokens, so there is nothing to evaluate: a target is the next"
            " token of the same document; hold out more documents, or evaluate more tokens"
        )

    def _evaluated(self) -> Iterator[Document | Tree]:
        """Returns the held-out documents in order, but for those that are dropped."""
        if not self.num_held_out:
            raise ValueError("there are no held-out documents: set held_out, for example to 0.01")
        documents = (
            self._read(number, index)
            for number, held in enumerate(self._held_out)
            for index in held.tolist()
        )
        return (document for document in documents if not self._is_dropped(document))

    def state(self) -> dict[str, Any]:
        """Returns the position of the next batch as JSON: a few numbers, no tokens."""
        state = self._fixed() | {
            "data": self.fingerprints,
            "sources": [asdict(counts) for counts in self._counts],
        }
        if self._rest is not None:
            rest = self._rest
            state["rest"] = [rest.source, rest.index, rest.offset, len(rest)]
        return state

    def restore(self, state: dict[str, Any]) -> None:
        """Continues with the batches that follow a ``state`` of a loader of the same documents."""
        self._counts, self._rest = self._position(LoaderState.read(state))

    def check(self, state: Any) -> None:
        """Raises the ValueError of ``restore``: DamagedStateError if it is no state of a loader."""
        self._position(LoaderState.read(state))

    def _position(self, state: LoaderState) -> tuple[list[Counts], Document | Tree | None]:
        """Returns the counts of a state, and what goes on in its next batch."""
        for source, before, now in zip(self.sources, state.data, self.fingerprints, strict=False):
            if words := change(before, now):
                raise ValueError(
                    f"{source.name} has changed since the checkpoint: {words}; use the same data"
                    " and tokenizer, or start from the beginning"
                )
        for name, value in self._fixed().items():
            if (saved := getattr(state, name)) != value:
                raise ValueError(
                    f"the saved state of the data has {name} = {saved} but this run has {value}:"
                    " set the same value, or start from the beginning"
                )
        for counts, trained in zip(state.sources, self._trained, strict=True):
            if counts.cursor >= len(trained):
                raise DamagedStateError(f"cursor {counts.cursor} of {len(trained)} documents")
        if state.rest is None:
            return state.sources, None
        number, index, offset, num_tokens = state.rest
        document = self._read(number, index)
        if len(document) != offset + num_tokens:
            raise ValueError(
                f"document {index} of {self.sources[number].name} has {len(document)} tokens"
                f" but had {offset + num_tokens} when the state was saved: use the same"
                " data and tokenizer, or start from the beginning"
            )
        # It may have become too long: a tree would fit into no batch.
        is_left_out = self._is_dropped(document)
        return state.sources, None if is_left_out else document.piece(offset, len(document))

    def _fixed(self) -> dict[str, Any]:
        """Returns the settings that a state depends on."""
        return {
            "seed": self.seed,
            "held_out": self.held_out,
            "weights": self._weights,
            "documents": self._sizes,
        }

    def _draw(self) -> Document | Tree:
        """Returns the next whole document or tree for training."""
        number = self._furthest_behind()
        counts = self._counts[number]
        # Twice the size of the source covers a full epoch from any position.
        for _ in range(2 * len(self._trained[number])):
            document = self._read(number, self._next_index(number))
            if self._is_dropped(document):
                counts.dropped += 1
            elif not len(document):
                counts.empty += 1
            else:
                counts.documents += 1
                counts.split += document.longest_row > self.context
                return document
        raise ValueError(
            f"{self.sources[number].name} has nothing to train on: all of its"
            f" {len(self._trained[number])} documents are empty or longer than the context of"
            f' {self.context} tokens; set overlong = "split" or remove the source'
        )

    def _furthest_behind(self) -> int:
        tokens = [counts.tokens for counts in self._counts]
        total, weight = sum(tokens), sum(self._weights)
        behind = [w * total - weight * t for w, t in zip(self._weights, tokens, strict=True)]
        return behind.index(max(behind))

    def _next_index(self, number: int) -> int:
        counts, (epoch, order) = self._counts[number], self._orders[number]
        if epoch != counts.epochs:
            order = shuffled(self._trained[number], self.seed, number, counts.epochs)
            self._orders[number] = (counts.epochs, order)
        index = int(order[counts.cursor])
        counts.cursor += 1
        if counts.cursor == len(order):
            counts.epochs, counts.cursor = counts.epochs + 1, 0
        return index

    def _read(self, number: int, index: int) -> Document | Tree:
        document = replace(self.sources[number].document(index), source=number)
        if isinstance(document, Tree) and self.overlong != "drop" and self._is_overlong(document):
            raise ValueError(
                f"document {index} of {self.sources[number].name} has {len(document)} tokens and a"
                f" row of {document.longest_row}, but there is room for {self._tree_tokens} tokens"
                f" that begin alike, and for {self.context} in a row: they are not split, so raise"
                ' train.tokens_per_step or data.context, or set data.overlong = "drop"'
            )
        return document

    def _is_overlong(self, document: Document | Tree) -> bool:
        fits = isinstance(document, Document) or len(document) <= self._tree_tokens
        return document.longest_row > self.context or not fits

    def _is_dropped(self, document: Document | Tree) -> bool:
        return self.overlong == "drop" and self._is_overlong(document)


def in_batches(
    documents: Iterable[Document | Tree], longest_piece: int, num_tokens: int
) -> Iterator[Batch]:
    """Yields documents in order, in pieces, in batches of at most ``num_tokens`` tokens."""
    pieces: list[Document] = []
    left = num_tokens
    for document in documents:
        for piece in document.pieces(longest_piece):
            size = sum(map(len, piece))
            if size > left:
                if pieces:
                    yield Batch(tuple(pieces))
                pieces, left = [], num_tokens
            pieces += piece
            left -= size
    if pieces:
        yield Batch(tuple(pieces))


def _whole_weights(weights: Sequence[float] | None, sources: Sequence[Source]) -> list[int]:
    """Returns weights as exact whole numbers (0.1 is one tenth), so that no rounding adds up."""
    weights = [1] * len(sources) if weights is None else weights
    if len(weights) != len(sources):
        raise ValueError(
            f"{len(weights)} weights for {len(sources)} sources: give one for each source"
        )
    for weight, source in zip(weights, sources, strict=True):
        if not 0 < weight < math.inf:
            raise ValueError(
                f"{source.name} has weight {weight}: it must be above 0; remove a source that is"
                " not wanted"
            )
    exact = [Fraction(str(weight)) for weight in weights]
    unit = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * unit) for weight in exact]
    return [weight // math.gcd(*whole) for weight in whole]
