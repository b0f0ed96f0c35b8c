"""Documents of several stages as one placement."""

from __future__ import annotations

import numpy as np
import pytest

from distca.pipeline.pool import pool_masks, pool_placements
from distca.planning.masks import Mask
from distca.planning.placement import Placement

FIRST = Placement.from_ranks([[5, 3], [{"document": 9, "start": 0, "stop": 4}]])
SECOND = Placement.from_ranks([[2], [7, 1]])


def test_rows_of_a_worker_stay_as_they_were() -> None:
    pool = pool_placements([FIRST, None, SECOND], workers=2)
    assert pool.num_workers == 6
    assert pool.tokens.tolist() == [8, 4, 0, 0, 2, 8]
    assert pool.lengths.tolist() == [5, 3, 4, 2, 7, 1]
    for stage, placement in ((0, FIRST), (2, SECOND)):
        here = pool.worker // 2 == stage
        for name in ("start", "stop", "row"):
            assert np.array_equal(getattr(pool, name)[here], getattr(placement, name)), name
        assert np.array_equal(pool.worker[here] - 2 * stage, placement.worker)


def test_each_document_has_the_mask_of_its_stage() -> None:
    window, causal = Mask(4), Mask()
    assert pool_masks([FIRST, None, SECOND], [window, None, causal]) == [window] * 3 + [causal] * 3


def test_stages_of_unequal_size_are_refused() -> None:
    with pytest.raises(ValueError, match="stage 1 is placed on 2 workers but every stage has 3"):
        pool_placements([None, FIRST], workers=3)
