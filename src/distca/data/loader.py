"""Global batches from weighted sources: what every step learns from, whatever the mesh.

[Note: Order] Each source is gone through in an order of its own for every epoch, a hash of (seed,
source, epoch, index). The next document comes from the source that is furthest behind its share of
the tokens so far, so a source is never ahead of its share by more than one document. A batch takes
documents until it is full; what is left of the last one opens the next batch, as a document of its
own. So the state is a cursor for each source and a reference to that rest, a few numbers, and the
same batches follow from it bit by bit. tokens_per_step and context may change in between.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import Any, Literal, get_args

import numpy as np

from distca.data.documents import Batch, Document
from distca.data.shuffle import Ints, choose_held_out, shuffled
from distca.data.sources import Source

Overlong = Literal["split", "drop"]


@dataclass
class Counts:
    """What has come from one source so far."""

    epochs: int = 0  # completed
    cursor: int = 0  # documents drawn in this epoch
    documents: int = 0  # drawn and kept
    tokens: int = 0  # handed out in batches
    split: int = 0  # of the documents kept, those longer than the context
    dropped: int = 0  # longer than the context, with overlong = "drop"
    empty: int = 0  # without a token


class Loader:
    """Draws batches of exactly ``tokens_per_step`` tokens; see [Note: Order].

    ``weights`` are shares of the tokens, one for each source, in any unit; equal by default.
    A document longer than ``context`` is split into pieces of that length (``overlong="split"``)
    or left out (``"drop"``). ``held_out`` documents, a share below 1 or a number, are never trained
    on; see ``evaluation``.
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
    ) -> None:
        if not 1 <= context <= tokens_per_step:
            raise ValueError(
                f"a context of {context} tokens in a step of {tokens_per_step}: it is at least 1,"
                " and a step holds a document of that length; set tokens_per_step >= context"
            )
        if overlong not in get_args(Overlong):
            raise ValueError(f'overlong = {overlong!r}: say "split" or "drop"')
        if not 0 <= seed < 2**63:
            raise ValueError(f"seed = {seed}: it is a whole number from 0 to below 2^63")
        if not sources:
            raise ValueError("no sources at all: give one or more; stdlib is always there")
        self.sources = tuple(sources)
        self.tokens_per_step, self.context, self.seed = tokens_per_step, context, seed
        self.overlong, self.held_out = overlong, held_out
        self._weights = _whole_weights(weights, self.sources)
        self._sizes = [len(source) for source in self.sources]
        self._held_out = choose_held_out(self._sizes, held_out)
        self._trained = [
            np.delete(np.arange(size), held)
            for size, held in zip(self._sizes, self._held_out, strict=True)
        ]
        for source, trained in zip(self.sources, self._trained, strict=True):
            if not len(trained):
                raise ValueError(
                    f"{source.name} has {len(source)} documents, all of them held out: a source"
                    " needs one or more to train on; hold out less or leave the source out"
                )
        self._counts = [Counts() for _ in self.sources]
        self._orders: list[tuple[int, Ints]] = [(-1, trained) for trained in self._trained]
        self._rest: Document | None = None  # of the document that the last batch cut

    @property
    def counts(self) -> tuple[Counts, ...]:
        """One for each source; a copy."""
        return tuple(replace(counts) for counts in self._counts)

    @property
    def num_held_out(self) -> int:
        return sum(map(len, self._held_out))

    def next_batch(self) -> Batch:
        documents, room = [], self.tokens_per_step
        while room:
            document = self._draw() if self._rest is None else self._rest
            stop = min(len(document), self.context, room)
            documents.append(document.piece(0, stop))
            self._rest = document.piece(stop, len(document)) if stop < len(document) else None
            self._counts[document.source].tokens += stop
            room -= stop
        return Batch(tuple(documents))

    def evaluation(self, num_tokens: int) -> Iterator[Batch]:
        """The held-out documents in order, uncut up to the context; training does not notice.

        A batch has at most ``num_tokens``, and less where the next document does not fit.
        """
        if num_tokens < self.context:
            raise ValueError(
                f"evaluation in batches of {num_tokens} tokens with a context of {self.context}:"
                " a batch must hold a document of that length"
            )
        if not self.num_held_out:
            raise ValueError("there are no held-out documents: set held_out, 0.01 say")
        return self._evaluation(num_tokens)

    def _evaluation(self, num_tokens: int) -> Iterator[Batch]:
        waiting: list[Document] = []
        room = num_tokens
        for number, held in enumerate(self._held_out):
            for index in held.tolist():
                document = self._read(number, index)
                if self._is_dropped(document):
                    continue
                for piece in document.pieces(self.context):
                    if len(piece) > room:
                        yield Batch(tuple(waiting))
                        waiting, room = [], num_tokens
                    waiting.append(piece)
                    room -= len(piece)
        if waiting:
            yield Batch(tuple(waiting))

    def state(self) -> dict[str, Any]:
        """Where the next batch begins, for JSON: a few numbers, no tokens."""
        state = self._fixed() | {"sources": [asdict(counts) for counts in self._counts]}
        if self._rest is not None:
            rest = self._rest
            state["rest"] = [rest.source, rest.index, rest.offset, len(rest)]
        return state

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from ``state``, of a loader over the same documents: the same batches follow."""
        for name, value in self._fixed().items():
            if name not in state or state[name] != value:
                raise ValueError(
                    f"the state of the data has {name} = {state.get(name)} but this run"
                    f" {value}: go on with the same, or start anew without the state"
                )
        counts = [Counts(**saved) for saved in state["sources"]]
        rest = None
        if "rest" in state:
            source, index, offset, num_tokens = state["rest"]
            document = self._read(source, index)
            if len(document) != offset + num_tokens:
                raise ValueError(
                    f"document {index} of {self.sources[source].name} has {len(document)} tokens"
                    f" but had {offset + num_tokens} when the state was saved: go on with the same"
                    " data and tokenizer, or start anew without the state"
                )
            rest = document.piece(offset, len(document))
        self._counts, self._rest = counts, rest

    def _fixed(self) -> dict[str, Any]:
        """What a state is only good for; a mix that changed would first make up for the past."""
        return {
            "seed": self.seed,
            "held_out": self.held_out,
            "weights": self._weights,
            "documents": self._sizes,
        }

    def _draw(self) -> Document:
        """The next document to train on, whole."""
        number = self._furthest_behind()
        counts = self._counts[number]
        # Twice its size, since one epoch in full may begin anywhere in another.
        for _ in range(2 * len(self._trained[number])):
            document = self._read(number, self._next_index(number))
            if self._is_dropped(document):
                counts.dropped += 1
            elif not len(document):
                counts.empty += 1
            else:
                counts.documents += 1
                counts.split += len(document) > self.context
                return document
        raise ValueError(
            f"{self.sources[number].name} gives nothing to train on: all of its"
            f" {len(self._trained[number])} documents are empty or longer than the context of"
            f' {self.context} tokens; set overlong = "split" or leave the source out'
        )

    def _furthest_behind(self) -> int:
        """The source with the largest share of the tokens so far still to come."""
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

    def _read(self, number: int, index: int) -> Document:
        return replace(self.sources[number].document(index), source=number)

    def _is_dropped(self, document: Document) -> bool:
        return self.overlong == "drop" and len(document) > self.context


def _whole_weights(weights: Sequence[float] | None, sources: Sequence[Source]) -> list[int]:
    """In whole numbers, as they are written (0.1 is a tenth), so that no rounding adds up."""
    weights = [1] * len(sources) if weights is None else weights
    if len(weights) != len(sources):
        raise ValueError(
            f"{len(weights)} weights for {len(sources)} sources: give one for each source"
        )
    for weight, source in zip(weights, sources, strict=True):
        if not 0 < weight < math.inf:
            raise ValueError(
                f"{source.name} has the weight {weight}: it must be above 0; leave out a source"
                " that is not wanted"
            )
    exact = [Fraction(str(weight)) for weight in weights]
    unit = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * unit) for weight in exact]
    return [weight // math.gcd(*whole) for weight in whole]
