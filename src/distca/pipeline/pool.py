"""The documents of all pipeline stages in one tick, as one placement over all ranks.

A tick's attention is planned over every rank at once: each stage brings the documents of its
micro-batch on its own workers, and a stage that brings none has workers free to serve.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distca.planning.masks import Mask
from distca.planning.placement import Placement
from distca.planning.spans import Ints


def pooled(stages: Sequence[Placement | None], workers: int) -> Placement:
    """Stage s on workers [s * workers, (s + 1) * workers); documents are numbered stage by stage.

    A worker's rows lie as they did in its stage, so tensors need not move.
    """
    columns: list[list[Ints]] = [[], [], [], [], []]
    documents = 0
    for stage, placement in enumerate(stages):
        if placement is None:
            continue
        if placement.num_workers != workers:
            raise ValueError(
                f"stage {stage} lies on {placement.num_workers} workers but stages have {workers}:"
                " place every micro-batch on as many"
            )
        parts = (
            placement.lengths,
            placement.document + documents,
            placement.start,
            placement.stop,
            placement.worker + stage * workers,
        )
        for column, part in zip(columns, parts, strict=True):
            column.append(part)
        documents += placement.num_documents
    none = np.zeros(0, np.int64)
    lengths, document, start, stop, worker = (np.concatenate([none, *c]) for c in columns)
    return Placement(lengths, document, start, stop, worker, workers * len(stages))


def masks_of(stages: Sequence[Placement | None], masks: Sequence[Mask | None]) -> list[Mask]:
    """Of each document of the pool: those of its stage's layer."""
    return [
        mask
        for placement, mask in zip(stages, masks, strict=True)
        if placement is not None and mask is not None
        for _ in range(placement.num_documents)
    ]
