"""Two ranks that share one GPU, over gloo: Megatron-Core's own numbers, in its own words (cuda)."""

from __future__ import annotations

import pytest
from ranks import RankPool

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from integrations import megatron_gpu_bodies as bodies
from integrations.megatron_bodies import Case

pytestmark = pytest.mark.gpu

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@pytest.mark.parametrize(
    "case",
    [Case(), Case(ahead=True, ours=FULL), Case(config={"window_size": (19, 0)}), Case(form="sbhd")],
    ids=["packed", "ahead-recompute", "windows", "documents-in-rows"],
)
def test_losses_and_gradients(pair: RankPool, case: Case) -> None:
    """In float32, where the kernels of both differ by their order of sums alone."""
    assert max(pair.run(bodies.stepped_on_gpu, case, ranks=2)) < 1e-5


def test_bfloat16(pair: RankPool) -> None:
    """As it is trained: as close to float32 as Megatron's own attention is."""
    for ours, own in pair.run(bodies.rounded_on_gpu, ranks=2):
        assert ours < 1.5 * own
