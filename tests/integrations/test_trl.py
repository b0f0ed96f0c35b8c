"""TRL's trainers: the losses and gradients of its own attention on the same rows.

trl is not in the pinned environment, so these tests are skipped there (CONTRIBUTING.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from integrations.tiny import MODELS, VOCAB, assert_close, gradients, model_of
from ranks import RankPool
from torch import Tensor

pytest.importorskip("trl", reason="trl is not installed")
pytest.importorskip("datasets", reason="datasets is not installed")

from integrations import trl_trainers, whole_models
from integrations.trl_trainers import Stepped

from distca.integrations.transformers import register
from distca.integrations.transformers.trl import adopt_models, gives_documents, pack_padded

SFT = {
    "packing": {"packing": True},
    "padding-free": {"padding_free": True, "max_length": None},
    "padded rows": {},
    "padding-free to a multiple": {
        "padding_free": True,
        "max_length": None,
        "pad_to_multiple_of": 64,
    },
    "wrapped packing": {"packing": True, "packing_strategy": "wrapped"},
}
GRPO = {
    "given completions": {},
    "reference model, old policy": {"beta": 0.1, "num_iterations": 2},
    "generated completions": {"max_completion_length": 20},
}


@pytest.fixture(scope="module")
def three() -> Iterator[RankPool]:
    """Three ranks of a gloo world."""
    pool = RankPool(3)
    yield pool
    pool.close()


def compared(
    pool: RankPool,
    train: Callable[..., Stepped],
    options: dict[str, Any],
    name: str = "llama",
    own: dict[str, Any] | None = None,
    ranks: int = 2,
) -> tuple[list[Stepped], list[Stepped]]:
    """Compares distca with TRL's own attention. own: the options of the latter."""
    right = pool.run(train, "sdpa", name, options if own is None else own, ranks=ranks)
    found = pool.run(train, "distca", name, options, ranks=ranks)
    for ours, exact in zip(found, right, strict=True):
        assert len(ours.losses) == 3
        assert ours.losses == pytest.approx(exact.losses, rel=1e-5, abs=1e-6)
        assert ours.norms == pytest.approx(exact.norms, rel=1e-5)
        assert min(ours.norms) > 0
        assert_close(ours.grads, exact.grads)
        assert ours.exchanges > 0
    return found, right


@pytest.mark.parametrize("options", SFT.values(), ids=SFT)
def test_sft(pair: RankPool, options: dict[str, Any]) -> None:
    """Without packing, TRL's own side is given padded rows, whatever ours is given."""
    found, _ = compared(pair, trl_trainers.sft, options, own=None if "packing" in options else {})
    assert all(one.logged["distca/imbalance"] >= 1 for one in found)


@pytest.mark.parametrize("padding_free", [True, False])
def test_packed_documents_are_planned_in_advance(padding_free: bool) -> None:
    """Rows that are padded are packed inside the model, where nothing can be planned before."""
    trainer = type("Trainer", (), {"__module__": "trl.trainer", "padding_free": padding_free})()
    assert gives_documents(trainer) == padding_free
    assert gives_documents(object())  # any other trainer


@pytest.mark.parametrize("options", GRPO.values(), ids=GRPO)
def test_grpo(pair: RankPool, options: dict[str, Any]) -> None:
    """Rows that begin with the same prompt share it, on each rank."""
    for ours, own in zip(*compared(pair, trl_trainers.grpo, options), strict=True):
        assert ours.tokens < own.tokens / 2


def test_dpo(pair: RankPool) -> None:
    for ours, own in zip(*compared(pair, trl_trainers.dpo, {}), strict=True):
        assert ours.tokens < own.tokens / 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("train", [trl_trainers.sft, trl_trainers.grpo, trl_trainers.dpo])
def test_three_ranks(three: RankPool, train: Callable[..., Stepped], name: str) -> None:
    options = {"packing": True} if train is trl_trainers.sft else {}
    compared(three, train, options, name, ranks=3)


def padded_rows() -> dict[str, Tensor]:
    """Returns completions of two prompts, padded on both sides as in GRPO, and a row of padding."""
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, VOCAB, (6, 60), generator=draw)
    tokens[1:3, :20], tokens[4, :20] = tokens[0, :20], tokens[3, :20]
    mask = torch.ones_like(tokens)
    for row, (left, right) in enumerate([(3, 0), (3, 35), (3, 10), (0, 39), (0, 1), (60, 0)]):
        mask[row, :left] = 0
        mask[row, 60 - right :] = 0
    labels = tokens.masked_fill(mask == 0, -100)
    labels[:, :20] = -100
    return {"input_ids": tokens * mask, "attention_mask": mask, "labels": labels}


def with_head(name: str, attention: str) -> Any:
    """Returns a model as TRL prepares it, and as adopt does."""
    from trl.trainer.utils import add_fused_lm_head

    register(cost="pairs")
    model = model_of(name, attention) if name in MODELS else whole_models.model_of(name, attention)
    values = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
    add_fused_lm_head(model, outputs=values)
    if attention == "distca":
        pack_padded(model)
    return model


@pytest.mark.parametrize("learns", [True, False], ids=["with gradients", "without"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gemma2", "gpt_oss"])
def test_values_of_tokens(name: str, learns: bool) -> None:
    """All values that TRL reads equal those of padded rows, and are 0 where there is no label."""
    results, grads = [], []
    for attention in ("eager", "distca"):
        model = with_head(name, attention)
        with torch.set_grad_enabled(learns):
            result = model(**padded_rows(), fused_lm_head=True)
        if learns:
            weights = torch.linspace(-1, 1, result.log_probs.numel()).view_as(result.log_probs)
            ((result.log_probs + 0.1 * result.entropy) * weights).sum().backward()
        results.append(result)
        grads.append(gradients(model))
    own, ours = results
    assert ours.keys() == own.keys()
    for key in own:
        torch.testing.assert_close(ours[key], own[key], rtol=1e-5, atol=1e-5)
    assert bool(grads[0]) == learns
    assert_close(grads[1], grads[0])


@pytest.mark.parametrize("name", ["qwen3_moe", "falcon_h1"])
def test_prompts_that_cannot_be_shared(name: str) -> None:
    """A balancing loss counts the tokens of all rows, and a state is not read twice."""
    rows = {key: value[3:5] for key, value in padded_rows().items()}  # with padding behind them
    experts = {"output_router_logits": True} if name == "qwen3_moe" else {}
    own, ours = (
        with_head(name, attention)(**rows, **experts, fused_lm_head=True)
        for attention in ("eager", "distca")
    )
    assert ("aux_loss" in own) == bool(experts)
    for key in own:
        torch.testing.assert_close(ours[key], own[key], rtol=1e-5, atol=1e-5)


def test_padding_between_tokens_is_refused() -> None:
    rows = padded_rows()
    rows["attention_mask"][0, 30] = 0
    with pytest.raises(ValueError, match="is given padding, which distca does not support"):
        with_head("llama", "distca")(**rows, fused_lm_head=True)


def test_continuous_batching_is_refused() -> None:
    class Trainer:
        use_transformers_continuous_batching = True

    with pytest.raises(ValueError, match="generates with a paged cache"):
        adopt_models(Trainer())
