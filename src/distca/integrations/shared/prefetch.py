"""Batches of a loader, each with its plans, which are made in the background.

[Note: ranks without a batch] Layers exchange, so every rank must call the model equally often. A
rank whose loader has ended continues with filler batches, which contribute nothing to the loss,
until the loaders of all ranks have ended. That way it also takes part in the trainer's own
collectives, in training and in evaluation.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from distca.integrations.shared.documents import Documents
from distca.integrations.shared.planned import BatchFuture, PlannedAttention

Batch = TypeVar("Batch")


def prefetch(
    loader: Iterable[Batch],
    attention: PlannedAttention,
    *,
    documents_of: Callable[[Batch], Documents],
    attach: Callable[[Batch, BatchFuture], Batch],
    filler: Callable[[Batch | None], Batch],
    depth: int = 1,
    deferred: bool = False,
) -> Iterator[Batch]:
    """Yields the batches of ``loader`` in their order, each with a future of its plans.

    All ranks iterate at the same points, however many batches each of them has.

    documents_of: returns a batch's documents, in order. If it raises ValueError on one rank, all
        ranks raise it.
    attach: returns the batch with its future, in the form in which the model looks for it.
    filler: returns a filler batch, given the last batch of this rank (None if it had none).
    depth: how many batches are read in advance; 0 if the caller reads in advance.
    deferred: whether a batch is planned only after ``attention.start()``, or when it is needed.
    """

    def planned() -> Iterator[Batch]:
        last: Batch | None = None
        for last in loader:
            try:
                future = attention.submit(documents_of(last), deferred=deferred)
            except ValueError as error:
                future = attention.submit([], error=str(error), deferred=deferred)
            yield attach(last, future)
        fill = filler(last)
        documents = documents_of(fill)
        while True:  # [Note: ranks without a batch]
            future = attention.submit(documents, done=True)
            if attention.wait(future) is None:
                return
            yield attach(fill, future)

    waiting: deque[Batch] = deque()
    for batch in planned():
        waiting.append(batch)
        if len(waiting) > depth:
            yield waiting.popleft()
    yield from waiting
