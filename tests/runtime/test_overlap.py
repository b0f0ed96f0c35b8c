"""Ping-pong hides every exchange but the first and the last, and gathers weights no more often."""

from __future__ import annotations

import pytest
from ranks import World
from recorded import exposed
from runtime.bodies import TINY, Case, batch_of
from runtime.recording import recorded_step

from distca.pipeline.mesh import MeshShape

LAYERS = TINY.layers


@pytest.mark.parametrize("recompute", [False, True])
def test_exchanges_lie_under_the_other_half(world: World, recompute: bool) -> None:
    case = Case(MeshShape(dp=2), ping_pong=True, recompute=recompute)
    batch = batch_of((150, 140, 9, 64, 1, 33, 20, 5))
    for forward, backward, collectives in world(2).run(recorded_step, case, batch, ranks=2):
        for events in (forward, backward):
            exchanges = sum(what == "start" for what, _ in events)
            assert exchanges == 2 * 2 * LAYERS  # out and back, ping and pong
            assert set(exposed(events)) <= {0, exchanges - 1}, events
        # Weights are gathered once for both halves: per seam once forward, once backward, and
        # gradients are reduced once.
        assert collectives["alltoall_base_"] == 2 * 2 * 2 * LAYERS
        assert collectives["_allgather_base_"] <= 2 * (LAYERS + 1)
        assert collectives["_reduce_scatter_base_"] == LAYERS + 1
