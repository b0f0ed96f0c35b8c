"""Two ranks that share one GPU over gloo, compared with Megatron-Core's own attention."""

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
    """In float32 the kernels differ only in the order of summation."""
    assert max(pair.run(bodies.stepped_on_gpu, case, ranks=2)) < 1e-5


def test_bfloat16(pair: RankPool) -> None:
    """In bfloat16 distca is as close to float32 as Megatron's own attention."""
    for ours, own in pair.run(bodies.rounded_on_gpu, ranks=2):
        assert ours < 1.5 * own
