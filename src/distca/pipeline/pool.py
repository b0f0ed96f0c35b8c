"""The documents of all pipeline stages in one tick, as one placement over all ranks.

The attention of a tick is planned over all ranks at once: each stage contributes the documents of
its micro-batch on its own workers, and the workers of a stage without documents are free to serve.
"""

from collections.abc import Sequence

import numpy as np

from distca.planning.masks import Mask
from distca.planning.placement import Placement
from distca.planning.prefixes import Prefixes
from distca.planning.spans import Ints
from distca.planning.two_way import TwoWaySpans


def pool_placements(stages: Sequence[Placement | None], workers: int) -> Placement:
    """Joins the placements of all stages; None is a stage without documents.

    Stage s is on workers [s * workers, (s + 1) * workers), and documents are numbered stage by
    stage. The rows of a worker keep their order, so tensors need not move.
    """
    columns: list[tuple[Ints, ...]] = [(np.zeros(0, np.int64),) * 5]
    documents, prefixes, two_way = 0, Prefixes.none(0), TwoWaySpans.none()
    for stage, placement in enumerate(stages):
        if placement is None:
            continue
        if placement.num_workers != workers:
            raise ValueError(
                f"stage {stage} is placed on {placement.num_workers} workers but every stage has"
                f" {workers}: place each micro-batch on {workers} workers"
            )
        p, worker = placement, placement.worker + stage * workers
        columns.append((p.lengths, p.document + documents, p.start, p.stop, worker))
        two_way = p.two_way.behind(two_way, documents)
        documents += p.num_documents
        prefixes = p.prefixes.behind(prefixes)
    lengths, document, start, stop, worker = map(np.concatenate, zip(*columns, strict=True))
    workers *= len(stages)
    return Placement(lengths, document, start, stop, worker, workers, prefixes, two_way)


def pool_masks(stages: Sequence[Placement | None], masks: Sequence[Mask | None]) -> list[Mask]:
    """Returns the mask of each document of the pool: that of its stage's layer."""
    return [
        mask
        for placement, mask in zip(stages, masks, strict=True)
        if placement is not None and mask is not None
        for _ in range(placement.num_documents)
    ]
