"""Completions that share their prompt, trained by transformers' models as if each were alone."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from integrations.tiny import VOCAB, assert_close, gradients, model_of
from ranks import RankPool

pytest.importorskip("transformers", reason="transformers is not installed")

from integrations import bodies

from distca.dispatch.layout import Layout
from distca.integrations.transformers import batch_places, collate_shared, register

Rows = list[dict[str, list[int]]]


def rollouts(seed: int, prompts: tuple[int, ...] = (60, 1), completions: int = 4) -> Rows:
    """Prompts without labels, each with completions of several lengths, in random order."""
    rng = np.random.default_rng(seed)
    rows: Rows = []
    for prompt in prompts:
        start = rng.integers(1, VOCAB, prompt).tolist()
        for _ in range(completions):
            end = rng.integers(1, VOCAB, int(rng.integers(1, 40))).tolist()
            rows.append({"input_ids": start + end, "labels": [-100] * prompt + end})
    return [rows[number] for number in rng.permutation(len(rows))]


def separately(model: Any, rows: Rows) -> torch.Tensor:
    """Returns the mean loss over all labels, of rows that are computed one by one."""
    total, count = torch.zeros(()), 0
    for row in rows:
        logits = model(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1]
        labels = torch.tensor(row["labels"][1:])
        total = total + torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        count += int((labels != -100).sum())
    return total / count


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gemma3"])
def test_rollouts_on_one_rank(name: str) -> None:
    register(cost="pairs")
    rows = rollouts(0, (130, 60, 1))
    plain, ours = model_of(name), model_of(name, "distca")
    right = separately(plain, rows)
    right.backward()
    batch = collate_shared(rows)
    assert batch["input_ids"].numel() < sum(len(row["input_ids"]) for row in rows) * 0.6
    result = ours(**batch)
    result.loss.backward()
    assert result.loss.item() == pytest.approx(right.item(), rel=1e-5)
    assert_close(gradients(ours), gradients(plain))
    for row, places in zip(rows, batch_places(rows), strict=True):
        alone = plain(input_ids=torch.tensor([row["input_ids"]])).logits[0]
        assert torch.allclose(result.logits[0, places], alone, atol=1e-4)


@pytest.mark.parametrize("ahead", [False, True])
def test_rollouts_on_two_ranks(pair: RankPool, ahead: bool) -> None:
    ranks = [rollouts(1, (300,)), rollouts(2, (20, 7))]
    plain = model_of("llama")
    losses = [separately(plain, rows) for rows in ranks]
    torch.stack(losses).sum().backward()
    answers = pair.run(bodies.learned_rollouts, ranks, ahead, ranks=2)
    for (loss, found), right in zip(answers, losses, strict=True):
        assert loss == pytest.approx(right.item(), rel=1e-5)
        assert_close(found, gradients(plain))


def test_a_batch_is_planned_once_for_layers_and_recomputation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    register(cost="pairs")
    model = model_of("llama", "distca").train()
    model.gradient_checkpointing_enable()
    layouts = Mock(side_effect=Layout.of)
    monkeypatch.setattr(Layout, "of", layouts)
    for number in (1, 2):
        model(**collate_shared(rollouts(number))).loss.backward()
        assert layouts.call_count == number  # both directions have the same tasks


def test_documents_of_another_batch_are_refused() -> None:
    register(cost="pairs")
    batch = collate_shared(rollouts(0))
    with pytest.raises(ValueError, match="distca_documents have 3 tokens, but the batch has"):
        model_of("llama", "distca")(**batch | {"distca_documents": (3,)})
