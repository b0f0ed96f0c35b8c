"""Batches that are planned ahead, and again after ranks are lost."""

from __future__ import annotations

from typing import Any

import numpy as np

from distca.data.documents import Batch, Document
from distca.pipeline.mesh import MeshShape
from distca.pipeline.step_planner import StepPlanner
from distca.planning.masks import Mask
from distca.planning.models import ModelShape
from distca.planning.options import PlanOptions
from distca.runtime.batches import Prefetcher


class CountingLoader:
    """Batch n has a document of 100 + n tokens."""

    def __init__(self) -> None:
        self.loaded = 0

    def next_batch(self) -> Batch:
        self.loaded += 1
        return Batch((Document.from_tokens(np.arange(100 + self.loaded)),))

    def state(self) -> dict[str, Any]:
        return {"loaded": self.loaded}


def test_no_batch_is_lost_or_loaded_twice() -> None:
    options = PlanOptions(model=ModelShape("layer", heads=2, kv_heads=2, head_dim=16), cost="cpu")
    before = StepPlanner(MeshShape(dp=2, servers=2), (Mask.parse("causal"),), options)
    after = before.with_servers(1, None)
    # What is prepared is the number of plan ranks, and who has prepared it.
    batches = Prefetcher(
        CountingLoader(), before, lambda plan: ("before", plan.slots[0][0][0].devices.num_ranks)
    )
    try:
        taken = [batches.next(before)]
        batches.plan_again(after, lambda plan: ("after", plan.slots[0][0][0].devices.num_ranks))
        assert batches.current is not None
        taken += [batches.current, *(batches.next(after) for _ in range(4))]
    finally:
        batches.close()
    assert [one.prepared for one in taken] == [("before", 4), *[("after", 3)] * 5]
    assert [len(one.step.batch.documents[0]) for one in taken] == [101, 101, 102, 103, 104, 105]
    assert [one.loader_state["loaded"] for one in taken] == [1, 1, 2, 3, 4, 5]


def test_batches_ahead_are_loaded_after_a_step_was_launched() -> None:
    """Not while the main thread launches it, for which it needs the interpreter."""
    options = PlanOptions(model=ModelShape("layer", heads=2, kv_heads=2, head_dim=16), cost="cpu")
    planner = StepPlanner(MeshShape(dp=2), (Mask.parse("causal"),), options)
    loader = CountingLoader()
    batches = Prefetcher(loader, planner, lambda plan: None)  # type: ignore[arg-type, return-value]
    loaded = []
    for _ in range(3):
        batches.next(planner)
        loaded.append(loader.loaded)
        batches.start()
        batches.close()  # after the work that has started
        loaded.append(loader.loaded)
    assert loaded == [1, 3, 3, 4, 4, 5]
