"""Whole documents into sets, and sets onto workers, as a loader packs them before a plan.

Nothing is dropped and no document lies in two sets, so the sum of all gradients is the same however
a batch is split. Numbers of documents are positions in the list of lengths.
"""

from __future__ import annotations

import heapq

import numpy as np

from distca.planning.placement import Placement
from distca.planning.spans import Ints, as_ints, cumulative

FILLER = 128  # tokens of a filler document at most: one tile of a kernel


def split(lengths: Ints, count: int) -> list[Ints]:
    """Sets of documents with about equal tokens and about equal attention, each in order.

    For micro-batches, and for the two halves of a ping-pong step.
    """
    lengths = as_ints(lengths)
    if count < 1:
        raise ValueError(f"{count} sets of documents: give 1 or more")
    if len(lengths) < count:
        raise ValueError(
            f"{len(lengths)} documents cannot be split into {count} sets of whole documents: take"
            " more tokens per step, shorter documents, fewer micro-batches, or ping-pong off"
        )
    # Both shares count: long documents even out the attention, short ones then the tokens.
    pairs = lengths * (lengths + 1) / 2
    weight = pairs / pairs.sum() + lengths / lengths.sum()
    return [np.sort(members) for members in _spread(lengths, weight, count)]


def by_group(lengths: Ints, dp: int, cp: int = 1, *, multiple: int = 1) -> Placement:
    """Documents as plain packed data parallel places them: whole on a group of ``cp`` workers.

    Groups get about equal tokens; inside one, documents follow each other in order over its
    workers. Filler documents, numbered after the real ones, make every worker's tokens a
    ``multiple``.
    """
    if dp < 1 or cp < 1 or multiple < 1:
        raise ValueError(f"dp {dp}, cp {cp}, multiple {multiple}: each must be 1 or more")
    lengths = as_ints(lengths)
    groups = _spread(lengths, lengths.astype(np.float64), dp)
    shards: list[tuple[int, int, int, int]] = []
    for group, members in enumerate(groups):
        own = lengths[np.sort(members)]
        per_worker = -(-int(own.sum()) // (cp * multiple)) * multiple
        ends = cumulative(own)
        for document, start in zip(np.sort(members).tolist(), ends[:-1].tolist(), strict=True):
            shards += _cut(document, int(lengths[document]), start, per_worker, group * cp)
    return filled(Placement.from_shards(lengths, shards, dp * cp), multiple)


def filled(placement: Placement, multiple: int) -> Placement:
    """The same with filler documents, so that every worker's tokens are a multiple."""
    missing = (-placement.tokens) % multiple
    if not missing.any():
        return placement
    shards = list(
        zip(
            placement.worker.tolist(),
            placement.document.tolist(),
            placement.start.tolist(),
            placement.stop.tolist(),
            strict=True,
        )
    )
    lengths = placement.lengths.tolist()
    for worker, count in enumerate(missing.tolist()):
        for start in range(0, count, FILLER):
            size = min(FILLER, count - start)
            shards.append((worker, len(lengths), 0, size))
            lengths.append(size)
    return Placement.from_shards(as_ints(lengths), shards, placement.num_workers)


def _spread(lengths: Ints, weight: np.ndarray, count: int) -> list[Ints]:
    """Largest weight first, always to the lightest set; ties go to the first."""
    heap = [(0.0, number) for number in range(count)]
    members: list[list[int]] = [[] for _ in range(count)]
    for document in np.lexsort((np.arange(len(lengths)), -weight)).tolist():
        load, number = heapq.heappop(heap)
        members[number].append(document)
        heapq.heappush(heap, (load + float(weight[document]), number))
    return [as_ints(chosen) for chosen in members]


def _cut(
    document: int, length: int, start: int, per_worker: int, first_worker: int
) -> list[tuple[int, int, int, int]]:
    """Shards (worker, document, start, stop) of a document that begins at a group's row."""
    shards = []
    done = 0
    while done < length:
        worker, row = divmod(start + done, per_worker)
        size = min(length - done, per_worker - row)
        shards.append((first_worker + worker, document, done, done + size))
        done += size
    return shards
