"""Layers that distca does not support raise an error and are never computed wrongly."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from integrations.tiny import by_sdpa, loss_of, model_of, packed

pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import DynamicCache, StaticCache, masking_utils

from distca.integrations.transformers import register
from distca.integrations.transformers.batches import documents_of
from distca.integrations.transformers.masks import read_mask, read_parts, visibility
from distca.integrations.transformers.model_call import ModelCall
from distca.integrations.transformers.packed_mask import PackedMask, PackedMaskFactory
from distca.planning.masks import BAND, CAUSAL, FULL, Mask

WAY_OUT = "attn_implementation"


@pytest.fixture(autouse=True)
def _registered() -> None:
    register(cost="pairs")


@pytest.mark.parametrize(
    ("keyword", "words"),
    [
        ("position_bias", "adds a bias to its scores"),
        ("indices", "selects the keys that it attends to"),
        ("cache", "attends to a paged cache"),
        ("head_mask", "masks heads"),
    ],
)
def test_layers_that_want_more(keyword: str, words: str) -> None:
    attend, x = register(cost="pairs").attend, torch.zeros(1, 2, 4, 8)
    sentence = rf"a layer \(Linear\) {words} \({keyword}\), which distca does not support: .*"
    for grad in (True, False):
        with (
            torch.set_grad_enabled(grad),
            pytest.raises(ValueError, match=sentence + WAY_OUT),
        ):
            attend(torch.nn.Linear(1, 1), x, x, x, None, **{keyword: x})


def test_layers_with_sinks_and_more_keys_than_tokens() -> None:
    """DeepSeek v4 appends compressed keys, which its own mask covers."""
    registered = register(cost="pairs")
    mask = registered.mask(
        batch_size=1,
        q_length=4,
        kv_length=4,
        mask_function=lambda b, h, q, k: k <= q,
        device="cpu",
    )
    q, k = torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, 6, 8)
    ends = torch.tensor([0, 4])
    given = {"s_aux": torch.zeros(2), "cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
    with pytest.raises(ValueError, match=r"k has shape \(6, 2, 8\) .* the plan places 4 tokens"):
        registered.attend(torch.nn.Linear(1, 1), q, k, k, mask, **given)


def test_dropout() -> None:
    model = model_of("llama", "distca", attention_dropout=0.1)
    with pytest.raises(ValueError, match=r"layer 0 .*uses attention dropout.*attention_dropout"):
        loss_of(model, packed([20, 9]))
    loss_of(model.eval(), packed([20, 9]))  # without dropout


def test_padding_is_refused_in_training_and_exact_in_evaluation() -> None:
    batch = packed([60])
    batch = {name: rows.view(2, 30) for name, rows in batch.items() if name != "position_ids"}
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][1, 20:] = 0
    batch["labels"] = torch.where(batch["attention_mask"] == 1, batch["labels"], -100)
    with pytest.raises(ValueError, match=r"layer 0 \(LlamaAttention\) is given padding"):
        loss_of(model_of("llama", "distca"), batch)
    with torch.no_grad():
        right, found = (loss_of(model_of("llama", a), batch).item() for a in ("sdpa", "distca"))
    assert found == pytest.approx(right, rel=1e-5)


def test_a_mask_of_ones_is_no_padding() -> None:
    batch = packed([30, 12])
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    losses, _ = by_sdpa("llama", [packed([30, 12])])
    assert loss_of(model_of("llama", "distca"), batch).item() == pytest.approx(losses[0], rel=1e-5)


def test_a_mask_of_the_users_own() -> None:
    batch = packed([30])
    batch["attention_mask"] = torch.ones(1, 1, 30, 30, dtype=torch.bool).tril()
    with pytest.raises(ValueError, match=r"layer 0 .*is given a mask of its own.*documents"):
        loss_of(model_of("llama", "distca"), batch)
    with torch.no_grad():
        right, found = (loss_of(model_of("llama", a), batch).item() for a in ("sdpa", "distca"))
    assert found == pytest.approx(right, rel=1e-5)


def test_a_model_that_handles_its_masks_itself() -> None:
    mask = register(cost="pairs").mask(
        batch_size=1,
        q_length=4,
        kv_length=4,
        mask_function=lambda b, h, q, k: k <= q,
        device="cpu",
    )
    x = torch.zeros(4, 4)
    for touch in (
        lambda: mask.dtype,
        lambda: mask[:, :, 0],
        lambda: x + mask,
        lambda: ~mask,
        lambda: x.masked_fill(mask, 0),
        lambda: torch.where(mask, x, x),
    ):
        with pytest.raises(ValueError, match=f"computes with its masks.*{WAY_OUT}"):
            touch()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"cu_seq_lens_q": torch.tensor([0, 5, 20])}, r"\[0, 5, 20\] for 30 tokens"),
        (
            {
                "cu_seq_lens_q": torch.tensor([0, 5, 30]),
                "cu_seq_lens_k": torch.tensor([0, 6, 30]),
            },
            "cu_seq_lens_q and cu_seq_lens_k differ",
        ),
        ({"cu_seq_lens_q": torch.tensor([0.0, 30.0])}, r"\[0.0, 30.0\] .*: give integers in a"),
        ({"cu_seq_lens_q": "0,30"}, r"'0,30' for 30 tokens: give integers in a tensor"),
        (
            {"distca_documents": "20,10"},
            "distca_documents are '20,10': give a list of",
        ),
        ({"distca_documents": (20.0, 10.0)}, r"documents are \(20.0, 10.0\): give a list"),
        ({"distca_documents": (40, -10)}, r"are \(40, -10\): give a list of lengths >= 1"),
        ({"distca_documents": torch.tensor([30])}, r"are tensor\(\[30\]\): give a list"),
        (
            {
                "cu_seq_lens_q": torch.tensor([0, 30]),
                "position_ids": packed([20, 10])["position_ids"],
            },
            "position_ids restart where neither cu_seq_lens_q nor",
        ),
    ],
)
def test_lengths_that_do_not_fit(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=rf"layer 0 \(LlamaAttention\).*{words}"):
        loss_of(model_of("llama", "distca"), packed([30]) | given)


def test_cumulative_lengths_in_a_list() -> None:
    model, batch = model_of("llama", "distca"), packed([20, 10])
    given = {"cu_seq_lens_q": [0, 20, 30], "cu_seq_lens_k": torch.tensor([0, 20, 30])}
    assert torch.equal(model(**batch | given).logits, model(**batch).logits)


def test_what_is_no_plan_no_token_and_no_mask() -> None:
    model, batch = model_of("llama", "distca"), packed([20, 10])
    with pytest.raises(ValueError, match="distca_batch is 3: leave it as plan_ahead gives it"):
        model(**batch, distca_batch=3)
    with pytest.raises(ValueError, match=r"is given no tokens \(shape \(1, 0\)\): leave such a"):
        model(batch["input_ids"][:, :0])
    with pytest.raises(ValueError, match="but has no kinds of layers: leave it out"):
        model(**batch | {"attention_mask": {"full_attention": None}})


@pytest.mark.parametrize("grad", [True, False])
def test_masks_that_number_documents(grad: bool) -> None:
    """transformers, too, reads every number but 0 as a 1."""
    model, batch = model_of("llama", "distca"), packed([20, 9])
    numbers = torch.tensor([1] * 20 + [2] * 9)[None]
    words = "attention_mask with other values than 0 and 1.*give position_ids that restart"
    given = {"input_ids": batch["input_ids"], "attention_mask": numbers}
    for cache in (None, StaticCache(config=model.config, max_cache_len=64)):
        with (
            torch.set_grad_enabled(grad),
            pytest.raises(ValueError, match=rf"layer 0 .*{words}"),
        ):
            model(**given, past_key_values=cache)
    with pytest.raises(ValueError, match=rf"the batch is given an {words}"):
        documents_of(given)


def test_layers_outside_of_a_model_are_told_nothing_of_documents() -> None:
    one = register(cost="pairs")
    asked = {"batch_size": 1, "q_length": 29, "kv_length": 29, "device": "cpu"}
    mask = one.mask(**asked, mask_function=lambda b, h, q, k: k <= q)
    q, k, v = torch.zeros(3, 1, 4, 29, 8)
    layer = model_of("llama", "distca").model.layers[0].self_attn
    with pytest.raises(ValueError, match=r"layer 0 .*cannot tell where .*give cu_seq_lens_q"):
        one.attend(layer, q, k, v, mask)
    one.attend(layer, q, k, v, mask, position_ids=packed([20, 9])["position_ids"])


def test_three_positions_for_each_token() -> None:
    """Models such as Qwen2-VL take them, but they do not tell where documents begin."""
    from integrations.family_models import IMAGE_TEXT
    from integrations.family_models import model_of as family

    tokens, positions = packed([20, 9])["input_ids"], torch.zeros(3, 1, 29, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"layer 0 .*\(3, 1, 29\) for 1 rows of 29 tokens: give"):
        family("qwen2_vl", "distca", IMAGE_TEXT)(input_ids=tokens, position_ids=positions)


def test_arguments_of_models_that_ask_for_more() -> None:
    model, batch = model_of("llama", "distca"), packed([20, 9])
    for given in ({"output_attentions": True}, {"head_mask": torch.ones(3, 4)}):
        (name,) = given
        for grad in (True, False):
            with (
                torch.set_grad_enabled(grad),
                pytest.raises(ValueError, match=rf"LlamaForCausalLM is given {name}, but .*eager"),
            ):
                model(**batch, **given)
    assert model(**batch, output_attentions=False).attentions is None


def test_caches_with_other_keys_are_refused_in_training() -> None:
    model, batch = model_of("llama", "distca"), packed([20, 9])
    filled = DynamicCache()
    with torch.no_grad():
        model(input_ids=batch["input_ids"][:, :5], past_key_values=filled, use_cache=True)
    for cache, keys in ((filled, 34), (StaticCache(config=model.config, max_cache_len=64), 64)):
        with pytest.raises(ValueError, match=rf"layer 0 .*{keys} keys for 29 queries: train with"):
            model(**batch, past_key_values=cache)


def test_models_are_left_as_they_are() -> None:
    """They are copied, pickled and called in parts or by position."""
    import copy
    import pickle

    model, batch = model_of("llama", "distca"), packed([20, 9])
    right = model(**batch).logits
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(**batch).logits, right)
    assert torch.equal(model(batch["input_ids"], None, batch["position_ids"]).logits, right)
    inner = model.model(input_ids=batch["input_ids"], position_ids=batch["position_ids"])
    assert torch.equal(model.lm_head(inner.last_hidden_state), right)


def test_fsdp_passes_packed_masks_on_as_they_are() -> None:
    """FSDP1 copies dataclasses for every layer."""
    from torch.distributed.utils import _apply_to_tensors

    mask = PackedMask(ModelCall(None, True, 1, 4), Mask(CAUSAL))
    assert _apply_to_tensors(lambda x: x, {"mask": mask})["mask"] is mask


S = 24
DOCUMENTS = torch.tensor([0] * 9 + [1] + [2] * 14)
BLOCKS = torch.tensor([-1] * 3 + [0] * 4 + [-1] * 5 + [1] * 8 + [-1] * 4)


def two_way(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return (BLOCKS[q] == BLOCKS[k]) & (BLOCKS[q] >= 0)


# The mask, its reach, and the queries that see the next key; None if it is not such a mask.
KINDS: dict[str, tuple[Callable[..., Any], int, list[int] | None]] = {
    "causal": (lambda b, h, q, k: k <= q, CAUSAL, []),
    "packed": (lambda b, h, q, k: (k <= q) & (DOCUMENTS[q] == DOCUMENTS[k]), CAUSAL, []),
    "window": (lambda b, h, q, k: (k <= q) & (k > q - 5), 5, []),
    "window, packed": (
        lambda b, h, q, k: (k <= q) & (k > q - 5) & (DOCUMENTS[q] == DOCUMENTS[k]),
        5,
        [],
    ),
    "a window that is not told": (lambda b, h, q, k: (k <= q) & (k > q - 5), CAUSAL, None),
    "full": (lambda b, h, q, k: q + k >= 0, FULL, []),
    "full as a span": (lambda b, h, q, k: q + k >= 0, CAUSAL, [*range(S - 1)]),
    "chunks": (lambda b, h, q, k: (k <= q) & (k // 8 == q // 8), -8, []),
    "chunks, packed": (
        lambda b, h, q, k: (k <= q) & (k // 8 == q // 8) & (DOCUMENTS[q] == DOCUMENTS[k]),
        -8,
        [],
    ),
    "a prefix": (lambda b, h, q, k: (k <= q) | (k < 6) & (q < 6), CAUSAL, [*range(5)]),
    "images": (
        lambda b, h, q, k: (k <= q) | two_way(q, k),
        CAUSAL,
        [3, 4, 5, *range(12, 19)],
    ),
    "images in a window": (
        lambda b, h, q, k: ((k <= q) | two_way(q, k)) & (k > q - 6),
        6,
        [3, 4, 5, *range(12, 19)],
    ),
    "images beyond a window": (
        lambda b, h, q, k: ((k <= q) & (k > q - 5)) | two_way(q, k),
        5,
        None,
    ),
    "images that see each other": (
        lambda b, h, q, k: (k <= q) | ((BLOCKS[q] >= 0) & (BLOCKS[k] >= 0)),
        CAUSAL,
        None,
    ),
    "strided": (lambda b, h, q, k: (k <= q) & ((q - k) % 2 == 0), CAUSAL, None),
    "not itself": (lambda b, h, q, k: k < q, CAUSAL, None),
    "padding": (lambda b, h, q, k: (k <= q) & (k > 3), CAUSAL, None),
    "a band": (lambda b, h, q, k: (q - k).abs() <= 3, BAND + 3, []),
    "a wider band": (lambda b, h, q, k: (q - k).abs() <= 4, BAND + 3, None),
    "a band that is not told": (lambda b, h, q, k: (q - k).abs() <= 3, CAUSAL, None),
}


@pytest.mark.parametrize("kind", KINDS)
def test_masks_are_told_apart(kind: str) -> None:
    function, reach, known = KINDS[kind]
    for one_by_one in (False, True):
        visible = visibility(function, (1, S), torch.device("cpu"), one_by_one=one_by_one)
        read = read_mask(visible, Mask(reach), torch.zeros(1, S, dtype=torch.bool))
        assert (read is not None) == (known is not None)
        if read is not None:
            packed_too = "packed" in kind
            starts = read.starts[0].nonzero().flatten().tolist()
            assert starts == ([0, 9, 10] if packed_too else [0])
            assert reach in (FULL, BAND + 3) or read.ahead[0].nonzero().flatten().tolist() == known


OF_TRANSFORMERS: dict[str, tuple[list[Any], int, bool]] = {  # parts, reach, whether they are known
    "causal": ([], CAUSAL, True),
    "packed": ([masking_utils.packed_sequence_mask_function(DOCUMENTS[None])], CAUSAL, True),
    "a window": ([masking_utils.sliding_window_overlay(5)], 5, True),
    "a packed window": (
        [
            masking_utils.sliding_window_overlay(5),
            masking_utils.packed_sequence_mask_function(DOCUMENTS[None]),
        ],
        5,
        True,
    ),
    "another window": ([masking_utils.sliding_window_overlay(6)], 5, False),
    "a window that is not told": ([masking_utils.sliding_window_overlay(5)], CAUSAL, False),
    "a window of one": ([masking_utils.sliding_window_overlay(1)], 1, False),
    "documents in pieces": (
        [masking_utils.packed_sequence_mask_function((torch.arange(S) % 9 == 0)[None].long())],
        CAUSAL,
        False,
    ),
    "a part of a model": ([lambda b, h, q, k: k >= 0], CAUSAL, False),
}


@pytest.mark.parametrize("kind", OF_TRANSFORMERS)
def test_parts_of_transformers_tell_the_same_as_the_values_of_masks(kind: str) -> None:
    others, reach, known = OF_TRANSFORMERS[kind]
    function = masking_utils.causal_mask_function
    for other in others:
        function = masking_utils.and_masks(other, function)
    of_parts = read_parts(function, Mask(reach), (1, S))
    assert (of_parts is not None) == known
    if of_parts is not None:
        visible = visibility(function, (1, S), torch.device("cpu"), one_by_one=False)
        of_values = read_mask(visible, Mask(reach), torch.zeros(1, S, dtype=torch.bool))
        assert of_values is not None
        for one, other in zip(of_parts, of_values, strict=True):
            assert torch.equal(one, other)


def test_documents_that_were_told_need_not_be_in_the_mask() -> None:
    """As with a cache, in encoders, and in PaliGemma, whose blocks reach into other documents."""
    told = torch.zeros(1, S, dtype=torch.bool)
    told[0, [9, 10]] = True
    causal, all_keys = (lambda b, h, q, k: k <= q), (lambda b, h, q, k: q + k >= 0)
    one_block = torch.tensor([0] * 5 + [1] * 4 + [1] + [0] * 6 + [1] * 8) == 0

    def leaking(b: Any, h: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return ((k <= q) & (DOCUMENTS[q] == DOCUMENTS[k])) | (one_block[q] & one_block[k])

    for function, reach, ahead in (
        (causal, CAUSAL, []),
        (all_keys, FULL, None),
        (leaking, CAUSAL, [0, 1, 2, 3, 10, 11, 12, 13, 14]),
    ):
        visible = visibility(function, (1, S), torch.device("cpu"), one_by_one=False)
        read = read_mask(visible, Mask(reach), told)
        assert read is not None
        assert ahead is None or read.ahead[0].nonzero().flatten().tolist() == ahead
    assert read_mask(visible, Mask(CAUSAL), torch.zeros_like(told)) is None


def test_chunks_look_like_documents_but_are_none() -> None:
    """The config tells, as in Llama 4, or else the documents of the batch."""

    def chunks(b: Any, h: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (k <= q) & (k // 8 == q // 8)

    asked = {"batch_size": 1, "q_length": S, "kv_length": S, "device": "cpu", "local_size": 8}
    for size, kind in ((8, "chunk:8"), (None, "window:8")):
        config = SimpleNamespace(attention_chunk_size=size)
        mask = PackedMaskFactory()(asked | {"mask_function": chunks, "config": config})
        assert (str(mask.mask), mask.error) == (kind, "")
    with pytest.raises(ValueError, match="none of those that distca supports for whole documents"):
        mask.check([S])


def test_a_batch_that_was_changed_after_it_was_planned() -> None:
    one = register(cost="pairs")
    (batch,) = one.plan_ahead([packed([30, 4])])
    short = {name: x[:, :-1] if isinstance(x, torch.Tensor) else x for name, x in batch.items()}
    with pytest.raises(ValueError, match=r"layer 0 .*33 tokens, but documents of 34 were planned"):
        loss_of(model_of("llama", "distca"), short)


def test_a_name_that_transformers_keeps_for_itself() -> None:
    with pytest.raises(ValueError, match="every name that contains flash"):
        register("distca-flash")
