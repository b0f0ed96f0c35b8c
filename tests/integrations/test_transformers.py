"""Models of transformers on two ranks: losses and all gradients of one process.

That process uses sdpa, or eager attention for sinks and soft caps, which sdpa does not support.
"""

from __future__ import annotations

import re

import pytest
import torch
from integrations.tiny import (
    LENGTHS,
    NOT_BY_SDPA,
    assert_close,
    by_eager,
    by_sdpa,
    gradients,
    loss_of,
    model_of,
    packed,
    reference,
)
from ranks import RankPool

pytest.importorskip("transformers", reason="transformers is not installed")

from integrations import bodies

LAYERS = 3
MODELS = ["llama", "qwen3", "mistral", "gemma3", "gemma2", "gpt_oss"]


@pytest.mark.parametrize("checkpointing", [None, "reentrant", "plain", "selective"])
@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients(pair: RankPool, name: str, checkpointing: str | None) -> None:
    losses, exact = reference(name)
    answers = pair.run(bodies.learned, name, checkpointing, ranks=2)
    for (loss, found, exchanges), right in zip(answers, losses, strict=True):
        assert loss == pytest.approx(right, rel=1e-5)
        assert_close(found, exact)
        # Dispatch and combine, in forward and backward; recomputation repeats those of forward.
        assert exchanges == (6 if checkpointing in ("reentrant", "plain") else 4) * LAYERS


def test_with_use_cache_which_is_the_default(pair: RankPool) -> None:
    """With a cache sdpa lets documents leak, so the reference runs without one."""
    losses, exact = reference("llama")
    answers = pair.run(bodies.learned, "llama", None, True, ranks=2)
    for (loss, found, _), right in zip(answers, losses, strict=True):
        assert loss == pytest.approx(right, rel=1e-5)
        assert_close(found, exact)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"return_flash_attn_kwargs": True},
        {"return_flash_attn_kwargs": True, "return_position_ids": False},
    ],
    ids=["position_ids", "both", "cu_seq_lens"],
)
def test_batches_of_the_flattening_collator(pair: RankPool, options: dict[str, bool]) -> None:
    losses, _ = reference("llama")
    assert pair.run(bodies.collated, options, ranks=2) == pytest.approx(losses, rel=1e-5)


def test_rows_are_documents(pair: RankPool) -> None:
    """A batch without packing has three rows of one document each."""
    batch = {name: rows.view(3, 120) for name, rows in packed([120] * 3).items()}
    del batch["position_ids"]
    assert pair.run(bodies.loss_of_rows, batch, ranks=2) == pytest.approx(
        [loss_of(model_of("llama"), batch).item()] * 2, rel=1e-5
    )


@pytest.mark.parametrize("ahead", [False, True])
def test_a_batch_is_gathered_once_and_planned_once_for_each_mask(
    pair: RankPool, ahead: bool
) -> None:
    """Some layers of the model have windows, and all layers are recomputed."""
    last = int(ahead)  # the message that no rank has another batch
    for gathered, planned, agreed in pair.run(bodies.planned_once, ahead, ranks=2):
        assert (gathered, planned, agreed) == (2 + last, 4, 4)


def test_plan_options(pair: RankPool) -> None:
    limits = {"speed": [1.0, 0.5], "memory_bytes": 1 << 24}
    for devices in pair.run(bodies.devices_of, limits, ranks=2):
        assert devices == [{"node": [0, 1], "speed": [1.0, 0.5], "memory_bytes": [1 << 24] * 2}]
    for devices in pair.run(bodies.devices_of, {"ranks_per_node": 2}, ranks=2):
        assert devices[0]["node"] == [0, 0]


@pytest.mark.parametrize("checkpointing", [None, "plain", "reentrant"])
def test_frozen_weights_with_adapters(pair: RankPool, checkpointing: str | None) -> None:
    exact, _ = pair.run(bodies.frozen, "sdpa", None, ranks=2)
    for found in pair.run(bodies.frozen, "distca", checkpointing, ranks=2):
        assert_close(found, exact)


def test_a_rank_without_a_batch_left_joins_with_fillers(pair: RankPool) -> None:
    lengths = [[[400, 5], [300], [200, 9]], [[60, 3]]]
    one_by_one = [packed(own, seed) for rank in lengths for seed, own in enumerate(rank)]
    losses, exact = by_sdpa("llama", one_by_one)
    (first, grads, exchanges), (second, same, _) = pair.run(
        bodies.planned_ahead, lengths, True, ranks=2
    )
    assert first == pytest.approx(losses[:3], rel=1e-5)
    assert second == [pytest.approx(losses[3], rel=1e-5), 0.0, 0.0]
    assert exchanges == 3 * 4 * LAYERS
    for found in (grads, same):
        assert_close(found, exact)


def test_a_rank_without_any_batch_joins_with_fillers(pair: RankPool) -> None:
    (first, _, _), (second, _, _) = pair.run(
        bodies.planned_ahead, [[[400, 5], [300]], []], True, ranks=2
    )
    assert len(first) == len(second) == 2
    assert second == [0.0, 0.0]


def test_evaluation_by_plans_is_shared_too(pair: RankPool) -> None:
    lengths = [[[400, 5], [300]], [[60, 3]]]
    (first, _, exchanges), _ = pair.run(bodies.planned_ahead, lengths, False, ranks=2)
    losses, _ = by_sdpa("llama", [packed(own, seed) for seed, own in enumerate(lengths[0])])
    assert first == pytest.approx(losses, rel=1e-5)
    assert exchanges == 2 * 2 * LAYERS


def test_evaluation_without_plans_is_local(pair: RankPool) -> None:
    first, second = pair.run(bodies.evaluated, [3, 1], ranks=2)
    losses, _ = by_sdpa("llama", [packed([50, 20], seed) for seed in range(3)])
    assert first == pytest.approx(losses, rel=1e-5)
    assert second == pytest.approx(losses[:1], rel=1e-5)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gemma2", "gpt_oss"])
def test_generation_is_local(pair: RankPool, name: str) -> None:
    """One prompt is padded, and the window is shorter than the prompts."""
    own = "eager" if name in NOT_BY_SDPA else "sdpa"
    assert pair.run(bodies.generated, name, "distca", ranks=2) == pair.run(
        bodies.generated, name, own, ranks=2
    )


@pytest.mark.alone
@pytest.mark.parametrize("ahead", [False, True])
def test_padding_on_one_rank_is_an_error_on_all(pair: RankPool, ahead: bool) -> None:
    (first, first_s), (second, second_s) = pair.run(bodies.padded_on_one, ahead, ranks=2)
    where = "the batch" if ahead else r"layer 0 \(LlamaAttention\)"
    assert re.match(where + " is given padding.*DataCollatorWithFlattening", second)
    assert first == f"rank 1 cannot take part: {second}"
    assert max(first_s, second_s) < 5


@pytest.mark.alone
def test_a_missing_rank_is_named(pair: RankPool) -> None:
    waiting, _ = pair.run(bodies.missing, ranks=2)
    assert "rank 1 did not come" in waiting


@pytest.mark.parametrize("name", ["llama", "gemma3", "gemma2", "gpt_oss"])
def test_documents_keep_to_themselves_in_training(pair: RankPool, name: str) -> None:
    assert pair.run(bodies.leaking, name, ranks=2) == [[], []]


def test_one_process_needs_no_world() -> None:
    from distca.integrations.transformers import register

    register(cost="pairs")
    model = model_of("gemma3", "distca")
    losses, exact = by_sdpa("gemma3", [packed(LENGTHS[0])])
    loss = loss_of(model, packed(LENGTHS[0]))
    loss.backward()
    assert loss.item() == pytest.approx(losses[0], rel=1e-5)
    assert_close(gradients(model), exact)


@pytest.mark.parametrize(
    ("name", "without"),
    [("gemma2", {"attn_logit_softcapping": None}), ("gpt_oss", {})],
)
def test_soft_caps_and_sinks_on_one_process(name: str, without: dict[str, None]) -> None:
    """They matter: without them the losses differ by more than the tolerance."""
    from distca.integrations.transformers import register

    register(cost="pairs")
    losses, exact = by_eager(name, LENGTHS[:1])
    model, other = model_of(name, "distca"), model_of(name, "distca", **without)
    loss = loss_of(model, packed(LENGTHS[0]))
    loss.backward()
    assert loss.item() == pytest.approx(losses[0], rel=1e-5)
    assert_close(gradients(model), exact)
    for parameter, values in other.named_parameters():
        if parameter.endswith("sinks"):
            assert gradients(model)[parameter].norm() > 1e-3
            values.data.fill_(-1e9)
    assert loss_of(other, packed(LENGTHS[0])).item() != pytest.approx(losses[0], rel=1e-4)


@pytest.mark.parametrize("name", NOT_BY_SDPA)
def test_evaluation_with_padding_as_eager_does_it(name: str) -> None:
    from distca.integrations.transformers import register

    register(cost="pairs")
    tokens = packed([60])["input_ids"].view(2, 30)
    mask = torch.ones_like(tokens)
    mask[0, :12], mask[1, :4] = 0, 0
    given = {"input_ids": tokens, "attention_mask": mask}
    with torch.no_grad():
        right, found = (model_of(name, one)(**given).logits for one in ("eager", "distca"))
    torch.testing.assert_close(found[mask == 1], right[mask == 1], rtol=1e-4, atol=1e-5)


def test_autocast_as_sdpa_does_it() -> None:
    """The norms of Qwen3 leave q and k in float32, while v is in bfloat16."""
    from distca.integrations.transformers import register

    register(cost="pairs")
    with torch.autocast("cpu", torch.bfloat16):
        right, found = (
            loss_of(model_of("qwen3", attention), packed([150, 9]))
            for attention in ("sdpa", "distca")
        )
    assert found.item() == pytest.approx(right.item(), rel=1e-3)
