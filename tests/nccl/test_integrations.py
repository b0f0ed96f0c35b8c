"""Models of other trainers on two ranks over NCCL, against their own attention."""

from __future__ import annotations

import pytest
from ranks import World

pytestmark = pytest.mark.nccl


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_transformers(gpu_world: World, name: str, ahead: bool) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    from integrations.bodies import learned_on_gpu
    from integrations.tiny import assert_close, reference

    losses, exact = reference(name)
    answers = gpu_world(2).run(learned_on_gpu, name, ahead, ranks=2)
    for (loss, found), right in zip(answers, losses, strict=True):
        assert loss == pytest.approx(right, rel=1e-4)
        assert_close(found, exact, 1e-4)


@pytest.mark.parametrize("case", [{}, {"ahead": True}, {"form": "sbhd"}], ids=str)
def test_megatron(gpu_world: World, case: dict[str, object]) -> None:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    from integrations.megatron_bodies import Case
    from integrations.megatron_gpu_bodies import stepped_on_gpu

    assert max(gpu_world(2).run(stepped_on_gpu, Case(**case), ranks=2)) < 1e-5


def test_torchtitan(gpu_world: World) -> None:
    pytest.importorskip(
        "torchtitan.trainer",
        reason="torchtitan is not installed, or needs another torch",
        exc_type=ImportError,
    )
    from integrations.torchtitan_bodies import trained

    options = {
        "training.seq_len": 8192,
        "training.global_batch_size": 4,  # two micro-batches per step
        "dataloader.dataset": "longer",
    }
    own, distca = (
        gpu_world(2).run(trained, attention, "selective", options, ranks=2)
        for attention in ("own", "distca")
    )
    for mine, theirs in zip(distca, own, strict=True):
        assert len(mine.steps) == 3
        for found, right in zip(mine.steps, theirs.steps, strict=True):
            assert found == pytest.approx(right, rel=1e-4)
        assert mine.exchanges
