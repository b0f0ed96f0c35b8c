"""A loader whose batches come with their plans, made in the background.

[Note: ranks without a batch] Layers exchange, so every rank must call the model as often as the
others. A rank whose loader has ended goes on with fillers, batches that teach nothing, until all
loaders have ended: it takes part in the trainer's own collectives too, in training and evaluation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from distca.integrations.shared.planned import PlannedAttention, Promise

Batch = TypeVar("Batch")


class Ahead(Generic[Batch]):
    """Batches of ``loader`` in their order, each with a promise of its plans.

    All ranks iterate at the same points, however many batches each of them has.

    lengths_of: the documents of a batch, in order; its ValueError becomes that of all ranks.
    attach: the batch with its promise, as the model will look for it.
    filler: a batch to join with, after the last one was this (None: there was none at all).
    depth: how many batches are read before they are asked for; 0 where the caller reads ahead.
    """

    def __init__(
        self,
        loader: Iterable[Batch],
        attention: PlannedAttention,
        *,
        lengths_of: Callable[[Batch], list[int]],
        attach: Callable[[Batch, Promise], Batch],
        filler: Callable[[Batch | None], Batch],
        depth: int = 1,
    ) -> None:
        self._loader, self._attention, self._depth = loader, attention, depth
        self._lengths_of, self._attach, self._filler = lengths_of, attach, filler

    def __iter__(self) -> Iterator[Batch]:
        waiting: deque[Batch] = deque()
        for batch in self._promised():
            waiting.append(batch)
            if len(waiting) > self._depth:
                yield waiting.popleft()
        yield from waiting

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        """Whatever else a trainer asks its loader for."""
        if name == "_loader":  # not there yet, while it is being copied
            raise AttributeError(name)
        return getattr(self._loader, name)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """That of the loader: trainers ask whether it is a DataLoader."""
        return self._loader.__class__

    def _promised(self) -> Iterator[Batch]:
        last: Batch | None = None
        for last in self._loader:
            try:
                promise = self._attention.submit(self._lengths_of(last))
            except ValueError as error:
                promise = self._attention.submit([], complaint=str(error))
            yield self._attach(last, promise)
        filler = self._filler(last)
        lengths = self._lengths_of(filler)
        while True:  # [Note: ranks without a batch]
            promise = self._attention.submit(lengths, done=True)
            if self._attention.wait(promise) is None:
                return
            yield self._attach(filler, promise)
