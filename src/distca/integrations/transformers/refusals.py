"""What is refused, because it would be computed wrongly: models, their arguments and their layers.

Models of transformers are known by their code. What cannot be known is a warning that names
``distca check``, at the first training step.
"""

from __future__ import annotations

import inspect
import logging
import re
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

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
# Classes of modules that carry a state from token to token, besides convolutions.
_STATEFUL = re.compile(
    r"Mamba|Recurrent(?!Gemma)|Rglru|DeltaNet|ShortConv|Lightning|(?<!Kimi)LinearAttention|Rwkv"
    r"|MobileBertEmbeddings"  # reads the tokens beside each one
)
# Those of transformers whose state is causal, so that documents can be kept apart. The families in
# docs/integrations/transformers_families.md are the test of that.
_CAUSAL_STATE = re.compile(
    r"(Mixer|MambaLayer|DeltaNet|DeltaAttention|ShortConv|LightningAttention|RecurrentBlock"
    r"|CCAProjection)$"
)
# Rotary positions that depend on the longest one of a row; a scale of queries beside others.
_BY_LONGEST, _SCALES_QUERIES = frozenset({"dynamic", "longrope"}), "llama_4_scaling_beta"
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


class _Nature(NamedTuple):
    """What the modules of a model tell about several documents in a row."""

    is_relative: bool  # only differences of positions count, so none has to restart
    scaled_from: int  # the token of a row from which queries are scaled by their place; 0: none
    stateful: str  # the class of a module that carries a state, if there is one
    mixing: str  # that of one which is not given each document by itself

    @classmethod
    def of(cls, model: nn.Module) -> _Nature:
        stateful = [*filter(_is_stateful, _own_modules(model))]
        apart = {inner for one in model.modules() if keeps_apart(one) for inner in one.modules()}
        mixing = (one for one in stateful if apart.isdisjoint(one.modules()))
        names = (next((type(one).__name__ for one in found), "") for found in (stateful, mixing))
        scaled_from = (_scaled_from(one) for one in model.modules())
        return cls(_is_relative(model), next(filter(None, scaled_from), 0), *names)


_natures: WeakKeyDictionary[nn.Module, _Nature] = WeakKeyDictionary()  # a search takes milliseconds


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
    if model not in _natures:
        _natures[model] = _Nature.of(model)
    is_relative, scaled_from, stateful, mixing = _natures[model]
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


def _own_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the modules inside, except those of other models, such as an encoder of sounds."""
    for child in module.children():
        if not isinstance(child, PreTrainedModel):
            yield child
            yield from _own_modules(child)


def _is_stateful(module: nn.Module) -> bool:
    convolves = isinstance(module, nn.Conv1d) and module.kernel_size[0] > 1
    return convolves or bool(_STATEFUL.search(type(module).__name__))


def carries_state(model: nn.Module) -> bool:
    """Tells whether some layer carries a state, so that documents cannot share a prefix."""
    return any(map(_is_stateful, _own_modules(model)))


def keeps_apart(module: nn.Module) -> bool:
    """Tells whether a layer with a state is given each document by itself (``states``)."""
    kind = class_of(module)
    of_transformers = kind.__module__.startswith("transformers.")
    return of_transformers and bool(_CAUSAL_STATE.search(kind.__name__))


def class_of(module: nn.Module) -> type[nn.Module]:
    """Returns the class that a module was made of; FSDP2 derives another one from it."""
    kind = type(module)
    return kind.__bases__[-1] if kind.__name__.startswith("FSDP") else kind


def _is_relative(model: nn.Module) -> bool:
    """Tells whether all positions of a model are rotary, of which only differences count.

    Some scale frequencies by the longest position, or queries by their own, and some states begin
    anew where position_ids are 0.
    """
    rotary = [one for one in model.modules() if "Rotary" in type(one).__name__]
    restarts = any("Rglru" in type(one).__name__ for one in model.modules())
    return bool(rotary) and not restarts and not any(map(_scales_by_position, rotary))


def _scales_by_position(rotary: nn.Module) -> bool:
    kinds = getattr(rotary, "rope_type", "default")
    named = kinds.values() if isinstance(kinds, Mapping) else (kinds,)
    parameters = getattr(getattr(rotary, "config", None), "rope_parameters", None) or {}
    return not _BY_LONGEST.isdisjoint(named) or _SCALES_QUERIES in parameters


def _scaled_from(layer: Any) -> int:
    """Returns the number of the token from which a layer scales queries by their place, or 0."""
    scales = getattr(layer, "attn_temperature_tuning", False) and not layer.use_rope
    return int(layer.floor_scale) if scales else 0


def _refuse_model(model: nn.Module, what: str, way_out: str = "") -> None:
    raise ValueError(
        f"belongs to {type(model).__name__}, which is given several documents in a row but {what}:"
        f" {way_out}give each document a row of its own"
    )
