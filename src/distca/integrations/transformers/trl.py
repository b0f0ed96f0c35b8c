"""The trainers of TRL: padded rows become packed documents, and what rows begin with is shared.

[Note: padded rows] TRL's trainers ask a model for values of single tokens instead of logits:
``model(input_ids, attention_mask, labels, fused_lm_head=True)`` returns log-probabilities and more,
each [B, S - 1]. Only its padding-free SFT gives packed documents; GRPO, DPO and plain SFT give
padded rows. ``pack_padded`` extends the ``forward`` of such a model: it packs the tokens of the
rows, calls the model with them, and puts the values where TRL expects them.

Legend: B rows, S tokens in a padded row, T tokens in the packed sequence.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from distca.data.documents import IGNORE
from distca.data.shared_prefixes import pack_rows
from distca.integrations.transformers.batches import DOCUMENTS
from distca.integrations.transformers.natures import carries_state

_PADDED = {"input_ids", "attention_mask", "labels", "fused_lm_head"}  # a call that can be packed
_KEPT = {"fused_lm_head", "use_cache", "output_router_logits", "num_items_in_batch"}


def is_of_trl(trainer: object) -> bool:
    return any(kind.__module__.startswith("trl.") for kind in type(trainer).__mro__)


def gives_documents(trainer: Any) -> bool:
    """Tells whether the batches of a trainer are packed documents, so that they can be planned."""
    return not is_of_trl(trainer) or bool(getattr(trainer, "padding_free", False))


def adopt_models(trainer: Any) -> None:
    """Lets the models of a TRL trainer pack padded rows."""
    if getattr(trainer, "use_transformers_continuous_batching", False):
        raise ValueError(
            "use_transformers_continuous_batching generates with a paged cache, which"
            " attn_implementation='distca' does not support: set it to False, or use vLLM"
        )
    for name in ("model", "ref_model"):
        model = getattr(trainer, name, None)
        if model is not None:
            pack_padded(trainer.accelerator.unwrap_model(model))


def pack_padded(model: Any) -> None:
    """Extends ``model.forward``, which TRL has given a fused head. [Note: padded rows]"""
    if hasattr(model, "get_base_model"):  # of PEFT
        model = model.get_base_model()
    forward = model.forward
    shares = not carries_state(model.base_model)

    @wraps(type(model).forward)  # generate and Trainer read its signature
    def packing(_: nn.Module, *args: Any, **given: Any) -> Any:
        if args or not _is_padded(given):
            return forward(*args, **given)
        # The balancing loss of experts counts every token, so that none may be left out.
        packed, places = _packed(given, share=shares and not given.get("output_router_logits"))
        result = forward(**packed)
        return type(result)(
            **{
                name: _to_rows(value, places) if value.ndim == 2 else value
                for name, value in result.items()
            }
        )

    model.forward = types.MethodType(packing, model)


def _is_padded(given: Mapping[str, Any]) -> bool:
    """Tells whether rows of text are given that may have padding on their sides.

    Other rows, such as those with images, are left as they are: layers refuse their padding.
    """
    present = {name for name, value in given.items() if value is not None}
    if not given.get("fused_lm_head") or not _PADDED <= present <= _PADDED | _KEPT:
        return False
    mask = given["attention_mask"]
    if not isinstance(mask, Tensor) or mask.shape != given["input_ids"].shape:
        return False
    begins = mask.bool().int().diff(dim=1, prepend=mask.new_zeros(len(mask), 1).int()) > 0
    return bool((begins.sum(1) <= 1).all())  # no padding between tokens


def _packed(given: Mapping[str, Any], *, share: bool) -> tuple[dict[str, Any], Tensor]:
    """Returns the arguments with packed rows, and [B, S - 1] the place of each label among them.

    The place is 0, where no label is, if there is no label.
    """
    tokens, labels, real = (given[key].cpu() for key in ("input_ids", "labels", "attention_mask"))
    real = real.bool()
    real[:, 0] |= ~real.any(1)  # a row without tokens keeps one
    rows = [row[keep].numpy() for row, keep in zip(tokens, real, strict=True)]
    targets = [row[keep].numpy() for row, keep in zip(labels, real, strict=True)]
    packed = pack_rows(rows, targets, share=share)
    places = torch.zeros_like(tokens)
    places[real] = torch.cat([torch.from_numpy(of_row) for of_row in packed.places])
    device = given["input_ids"].device
    arguments = {
        "input_ids": torch.from_numpy(packed.tokens)[None].to(device),
        "position_ids": torch.from_numpy(packed.positions)[None].to(device),
        "labels": torch.from_numpy(packed.labels)[None].to(device),
        DOCUMENTS: packed.documents,
    }
    kept = {name: value for name, value in given.items() if name in _KEPT}
    has_label = (labels != IGNORE) & real
    places = places.where(has_label, 0)[:, 1:].to(device)
    return arguments | kept, places


def _to_rows(values: Tensor, places: Tensor) -> Tensor:
    """[B, S - 1] Returns the values [1, T - 1] of labels; 0 where there is no label."""
    return torch.cat([values.new_zeros(1), values[0]])[places]
