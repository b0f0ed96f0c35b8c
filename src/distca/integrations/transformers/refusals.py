"""What is refused, because it would be computed wrongly: models, their arguments and their layers.

Models of transformers are known by their code. What cannot be known is a warning that names
``distca check``, at the first training step.
"""

from __future__ import annotations

import inspect
import logging
import re
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from distca.integrations.transformers.natures import class_of, keeps_apart, nature_of

if TYPE_CHECKING:
    from distca.integrations.transformers.calls import CallInProgress, Calls

WAY_OUT = "load this model with another attn_implementation, such as 'eager'"

_OF_LAYERS = {  # arguments by which layers ask for more than softmax(QK^T)V
    "position_bias": "adds a bias to its scores (position_bias)",
    "indices": "selects the keys that it attends to (indices)",
    "block_indices": "selects the keys that it attends to (block_indices)",
    "cache": "attends to a paged cache (cache)",
    "head_mask": "masks heads (head_mask)",
    "layer_head_mask": "masks heads (layer_head_mask)",
}
_OF_MODELS = {  # the same of models
    "output_attentions": "returns no attention weights",
    "head_mask": "masks no heads",
    "decoder_head_mask": "masks no heads",
    "cross_attn_head_mask": "masks no heads",
}
# A choice among a model's own classes, by which older models raise a KeyError for other names.
_CHOICE = re.compile(r"_CLASSES\[\s*(self\.)?config\._attn_implementation")

_log = logging.getLogger(__name__)
_checked: set[type[nn.Module]] = set()


def refuse_own_attention(kind: Any, name: str) -> None:
    """Raises if a model of transformers computes its attention itself.

    transformers tells that of a file. It is not asked about models with several configs, whose text
    model is in another file, nor about the encoders of images and sounds.
    """
    if not kind.__module__.startswith("transformers."):
        return
    uses_interface = getattr(kind, "_can_set_attn_implementation", lambda: True)
    is_text = kind.main_input_name == "input_ids" and not kind.config_class.sub_configs
    try:
        source = inspect.getsource(sys.modules[kind.__module__])
    except OSError:  # installed without it
        source = ""
    if (is_text and not uses_interface()) or _CHOICE.search(source):
        raise ValueError(
            f"{kind.__name__} computes its attention itself and cannot use"
            f" attn_implementation={name!r}: {WAY_OUT}"
        )


def refuse_arguments(call: CallInProgress) -> None:
    kind = type(call.model).__name__
    if call.tokens is not None and not call.tokens.numel():
        raise ValueError(
            f"{kind} is given no tokens (shape {tuple(call.tokens.shape)}): leave such a batch out,"
            " plan_ahead adds filler batches"
        )
    masks = call.given.get("attention_mask")
    config: Any = call.model.config
    has_kinds = hasattr(config.get_text_config(), "layer_types")
    if isinstance(masks, Mapping) and None in masks.values() and not has_kinds:
        raise ValueError(
            f"{kind} is given an attention_mask of {dict(masks)}, but has no kinds of layers: leave"
            " it out"
        )
    by_config = {"output_attentions": getattr(call.model.config, "output_attentions", None)}
    for argument, what in _OF_MODELS.items():
        value = call.given.get(argument)
        value = by_config.get(argument) if value is None else value
        if value is not None and value is not False:
            raise ValueError(
                f"{kind} is given {argument}, but distca {what}: leave it out, or {WAY_OUT}"
            )


def refuse_layer(where: str, dropout: float, given: Mapping[str, Any]) -> None:
    if dropout:
        raise ValueError(
            f"{where} uses attention dropout ({dropout}), which distca does not support: set"
            " attention_dropout to 0 in the model's config"
        )
    for keyword, what in _OF_LAYERS.items():
        if given.get(keyword) is not None:
            raise ValueError(f"{where} {what}, which distca does not support: {WAY_OUT}")


def refuse_mask(
    where: str,
    module: nn.Module,
    mask: Tensor | None,
    given: Mapping[str, Any],
    *,
    several: bool,
) -> None:
    """Raises if a causal layer is trained without a PackedMask, or has no mask at all.

    Layers that are not causal, such as those of an image encoder, are computed by sdpa.

    several: whether some row holds several documents, which no mask can tell apart
    """
    causal = given.get("is_causal")
    if causal is None:
        causal = getattr(module, "is_causal", True)
    if causal and (torch.is_grad_enabled() or several):
        raise ValueError(
            f"{where} is given {'no mask' if mask is None else 'a mask of its own'}, so that"
            f" documents cannot be told apart: {WAY_OUT}"
        )


def refuse_packed(calls: Calls, *, continued: bool) -> None:
    """Raises if models that are given several documents in a row are known to mix them.

    continued: some document continues another one
    """
    if not calls:  # layers that are called without their model
        return
    model = calls[-1].model  # that made the mask, without the encoders beside it
    told = [call for call in calls if call.given.get("position_ids") is not None]
    if told and not any(call.uses_positions for call in told):
        _refuse_model(told[0].model, "ignores position_ids, so that positions do not restart")
    is_relative, scaled_from, stateful, mixing = nature_of(model)
    if not told and not is_relative:
        if not any(call.takes_positions for call in calls):
            _refuse_model(model, "takes no position_ids, so that positions do not restart")
        _refuse_model(model, "no position_ids that restart", "give them too, or ")
    tokens = calls[-1].tokens
    if scaled_from and tokens is not None and tokens.shape[1] >= scaled_from:
        what = (
            f"scales queries by their place in the row from token {scaled_from} on"
            " (attn_temperature_tuning)"
        )
        _refuse_model(model, what, "make rows shorter, or ")
    if mixing:
        _refuse_model(model, f"carries a state from each to the next ({mixing})")
    if stateful and continued:
        what = f"carries a state, which documents cannot share as a prefix ({stateful})"
        _refuse_model(model, what)
    for call in calls:
        call.packed = True


def refuse_own_mask(call: CallInProgress) -> NoReturn:
    """Raises because a model was given a mask of ours, and has made another."""
    raise ValueError(
        f"{type(call.model).__name__} is given a mask that it does not pass on to its layers as it"
        f" is, which distca does not support: {WAY_OUT}"
    )


def check_use(call: CallInProgress) -> None:
    """Checks after a call which modules have called distca's attention.

    After one without gradients, only if none has, and documents share a row.
    """
    kind = class_of(call.model)
    name = kind.__name__
    if not call.attended and call.tokens is not None:
        raise ValueError(f"{name} has not called the attention that it was given: {WAY_OUT}")
    if not call.packed or kind in _checked:
        return
    _checked.add(kind)
    passed_over = _layers_without(call)
    if passed_over or not kind.__module__.startswith("transformers."):
        what = "is not one of transformers' own models"
        if passed_over:
            what = f"has layers that do not call distca's attention ({passed_over[0]})"
        _log.warning(
            "%s %s, so it is not known whether packed documents stay separate: check it with"
            " `distca check MODEL_DIR`",
            name,
            what,
        )


def _layers_without(call: CallInProgress) -> list[str]:
    """Returns the layers beside which others of the same list have called distca's attention.

    Layers with a state that keep documents apart need not.
    """
    found = []
    for name, layers in call.model.named_modules():
        if isinstance(layers, nn.ModuleList):
            used = [not call.attended.isdisjoint(layer.modules()) for layer in layers]
            known = [any(map(keeps_apart, layer.modules())) for layer in layers]
            if any(used):
                both = enumerate(zip(used, known, strict=True))
                found += [f"{name}.{number}" for number, one in both if not any(one)]
    return found


def _refuse_model(model: nn.Module, what: str, way_out: str = "") -> None:
    raise ValueError(
        f"belongs to {type(model).__name__}, which is given several documents in a row but {what}:"
        f" {way_out}give each document a row of its own"
    )
