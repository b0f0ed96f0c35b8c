"""Under the plain Trainer, Accelerate and FSDP2: the losses of sdpa, step by step."""

from __future__ import annotations

import pytest
from integrations.tiny import assert_close, reference
from ranks import RankPool

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

from integrations import trainers

BOTH_KINDS = [{"use_reentrant": True}, {"use_reentrant": False}]


@pytest.mark.parametrize("ahead", [False, True], ids=["planned when needed", "planned ahead"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_trainer(pair: RankPool, name: str, ahead: bool) -> None:
    """With evaluation after each epoch, short last batches, and a number of batches that is odd."""
    (losses, evaluation, _), _ = pair.run(trainers.trained, "sdpa", False, name, {}, ranks=2)
    for found in pair.run(trainers.trained, "distca", ahead, name, {}, ranks=2):
        assert found[0] == pytest.approx(losses, rel=1e-5)
        assert found[1] == pytest.approx(evaluation, rel=1e-5)
        assert found[2] > 0


@pytest.mark.parametrize("kind", BOTH_KINDS, ids=["reentrant", "not reentrant"])
def test_trainer_with_checkpointing_and_accumulation(pair: RankPool, kind: dict[str, bool]) -> None:
    options = {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": kind,
        "gradient_accumulation_steps": 2,
    }
    (losses, evaluation, _), _ = pair.run(
        trainers.trained, "sdpa", False, "llama", options, ranks=2
    )
    for found in pair.run(trainers.trained, "distca", True, "llama", options, ranks=2):
        assert found[0] == pytest.approx(losses, rel=1e-5)
        assert found[1] == pytest.approx(evaluation, rel=1e-5)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_trainer_with_fsdp2(pair: RankPool, name: str) -> None:
    """As Accelerate shards it for a Trainer; layers are recomputed."""
    again = {"gradient_checkpointing": True}
    (losses, evaluation, _), _ = pair.run(trainers.trained, "sdpa", False, name, {}, ranks=2)
    for found in pair.run(trainers.trained, "distca", True, name, again, True, ranks=2):
        assert found[0] == pytest.approx(losses, rel=1e-5)
        assert found[1] == pytest.approx(evaluation, rel=1e-5)
        assert found[2] > 0


@pytest.mark.parametrize("flash", [False, True], ids=["position_ids", "cu_seq_lens"])
def test_accelerate_with_uneven_batches(pair: RankPool, flash: bool) -> None:
    right = pair.run(trainers.accelerated, "sdpa", flash, ranks=2)
    found = pair.run(trainers.accelerated, "distca", flash, ranks=2)
    for (losses, evaluation, exchanges), exact in zip(found, right, strict=True):
        assert losses == pytest.approx(exact[0], rel=1e-5)
        assert evaluation == pytest.approx(exact[1], rel=1e-5)
        assert exchanges > 0


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_fsdp2(pair: RankPool, name: str, checkpointing: bool) -> None:
    losses, exact = reference(name)
    for (loss, found), right in zip(
        pair.run(trainers.sharded, name, checkpointing, ranks=2), losses, strict=True
    ):
        assert loss == pytest.approx(right, rel=1e-5)
        assert_close(found, exact)
