"""Trainer, Accelerate and FSDP2: the losses of sdpa in every step."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import cache
from typing import Any

import pytest
from integrations.tiny import assert_close, features, packed, reference
from quick import others_slow
from ranks import RankPool
from torch.utils.data import DataLoader

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

from integrations import trainers

from distca.integrations.transformers import register
from distca.integrations.transformers.batches import PLANNED
from distca.integrations.transformers.loader import PrefetchingLoader


def test_a_prefetching_loader_is_a_data_loader() -> None:
    """It has that type, and the attributes of the loader that it wraps."""
    loader: Any = DataLoader([packed([5, 3])] * 3, None)
    prefetching = register(cost="pairs").plan_ahead(loader)
    assert issubclass(type(prefetching), DataLoader)
    assert prefetching.__class__ is type(prefetching)
    assert len(prefetching) == len(list(prefetching)) == 3
    for name in ("dataset", "sampler", "batch_size", "num_workers", "multiprocessing_context"):
        assert getattr(prefetching, name) is getattr(loader, name)
    assert copy(prefetching).dataset is loader.dataset
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        prefetching.nothing  # noqa: B018


def test_a_loader_of_accelerate_is_changed_once() -> None:
    from accelerate.data_loader import DataLoaderShard, skip_first_batches
    from transformers import DataCollatorWithFlattening

    registered, documents = register(cost="pairs"), features([5, 3, 8, 2, 4, 6])
    loader = DataLoaderShard(documents, batch_size=2, collate_fn=DataCollatorWithFlattening())
    for _ in range(2):
        assert registered.plan_ahead(loader) is loader
    assert isinstance(loader, DataLoader)
    assert type(loader.base_dataloader) is PrefetchingLoader
    assert type(loader.base_dataloader._loader) is DataLoader
    assert [PLANNED in batch for batch in loader] == [True] * 3
    assert len(list(skip_first_batches(loader, 1))) == 2  # as a Trainer resumes


BOTH_KINDS = [{"use_reentrant": True}, {"use_reentrant": False}]
BySdpa = Callable[..., trainers.Trained]


@pytest.fixture(scope="module")
def by_sdpa(pair: RankPool) -> BySdpa:
    """What sdpa learns, by the name of a model and the batches that a step accumulates."""

    @cache
    def trained(name: str, accumulated: int = 1) -> trainers.Trained:
        options = {"gradient_accumulation_steps": accumulated}
        return pair.run(trainers.trained, "sdpa", False, name, options, ranks=2)[0]

    return trained


@pytest.mark.parametrize("ahead", [False, True], ids=["planned when needed", "planned ahead"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_trainer(pair: RankPool, by_sdpa: BySdpa, name: str, ahead: bool) -> None:
    """It evaluates after each epoch; last batches are short, and the number of batches is odd."""
    losses, evaluation, *_ = by_sdpa(name)
    for found in pair.run(trainers.trained, "distca", ahead, name, {}, ranks=2):
        assert found.losses == pytest.approx(losses, rel=1e-5)
        assert found.evaluation == pytest.approx(evaluation, rel=1e-5)
        assert found.exchanges > 0
        assert len(found.figures) == len(losses)
        for step in found.figures if ahead else ():
            assert 1 <= step["imbalance"] <= step["imbalance_before"]
            assert step["attention_s"] > 0
            assert min(step["exposed_s"], step["plan_wait_s"], step["planning_s"]) >= 0
        assert any(step.get("gb_per_layer", 0) > 0 for step in found.figures) == ahead


@pytest.mark.parametrize("kind", BOTH_KINDS, ids=["reentrant", "not reentrant"])
def test_trainer_with_checkpointing_and_accumulation(
    pair: RankPool, by_sdpa: BySdpa, kind: dict[str, bool]
) -> None:
    options = {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": kind,
        "gradient_accumulation_steps": 2,
    }
    losses, evaluation, *_ = by_sdpa("llama", accumulated=2)
    for found in pair.run(trainers.trained, "distca", True, "llama", options, ranks=2):
        assert found[0] == pytest.approx(losses, rel=1e-5)
        assert found[1] == pytest.approx(evaluation, rel=1e-5)


@pytest.mark.parametrize("name", others_slow(["llama", "gemma3"], quick={"gemma3"}))
def test_trainer_with_fsdp2(pair: RankPool, by_sdpa: BySdpa, name: str) -> None:
    """Accelerate shards the model for a Trainer, and layers are recomputed."""
    again = {"gradient_checkpointing": True}
    losses, evaluation, *_ = by_sdpa(name)
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
