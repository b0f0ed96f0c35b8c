"""A tick runs in the order of its program, which hides all exchanges but the first and the last."""

from __future__ import annotations

import pytest
from ranks import World
from recorded import exposed
from runtime.bodies import TINY, Case, batch_of
from runtime.recording import operations, recorded_step, uses_prepared_plans

from distca.pipeline.mesh import MeshShape
from distca.pipeline.schedule import BACKWARD, FORWARD
from distca.pipeline.tick_program import TickProgram

LAYERS = TINY.layers
BATCH = batch_of((150, 140, 9, 64, 1, 33, 20, 5))
PROGRAMS = [
    [(op.kind, op.half) for op in TickProgram.of(LAYERS, 2, phase).operations]
    for phase in (FORWARD, BACKWARD)
]


@pytest.mark.parametrize("recompute", [False, True])
def test_a_tick_runs_as_its_program_says(world: World, recompute: bool) -> None:
    """Backward, where autograd chooses the order, too."""
    case = Case(MeshShape(dp=2), ping_pong=True, recompute=recompute)
    for *ticks, collectives in world(2).run(recorded_step, case, BATCH, ranks=2):
        for events, program in zip(ticks, PROGRAMS, strict=True):
            assert operations(events) == program
            exchanges = sum(what == "start" for what, _ in events)
            assert exchanges == 2 * 2 * LAYERS  # dispatch and combine, ping and pong
            computing = [("compute" if what == "linear" else what, half) for what, half in events]
            assert set(exposed(computing)) <= {0, exchanges - 1}, events
        # Weights are gathered once for both halves: per seam once forward, once backward, and
        # gradients are reduced once.
        assert collectives["_allgather_base_"] <= 2 * (LAYERS + 1)
        assert collectives["_reduce_scatter_base_"] == LAYERS + 1


def test_a_server_runs_the_same_program_without_linear_layers(world: World) -> None:
    case = Case(MeshShape(dp=2, servers=1), ping_pong=True)
    for rank, (*ticks, _) in enumerate(world(3).run(recorded_step, case, BATCH, ranks=3)):
        for events, program in zip(ticks, PROGRAMS, strict=True):
            mine = [op for op in program if rank < 2 or op[0] != "linear"]
            assert operations(events) == mine


def test_fsdp_does_not_copy_plans(world: World) -> None:
    """It walks through the arguments of a seam, which takes longer the more documents there are."""
    assert all(world(2).run(uses_prepared_plans, Case(MeshShape(dp=2)), BATCH, ranks=2))
