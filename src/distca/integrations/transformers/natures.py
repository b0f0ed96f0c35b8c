"""What the modules of a model tell about several documents in a row: positions and states."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import nn
from transformers import PreTrainedModel

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


class Nature(NamedTuple):
    """What the modules of a model tell about several documents in a row."""

    is_relative: bool  # only differences of positions count, so none has to restart
    scaled_from: int  # the token of a row from which queries are scaled by their place; 0: none
    stateful: str  # the class of a module that carries a state, if there is one
    mixing: str  # that of one which is not given each document by itself

    @classmethod
    def of(cls, model: nn.Module) -> Nature:
        stateful = [*filter(_is_stateful, _own_modules(model))]
        apart = {inner for one in model.modules() if keeps_apart(one) for inner in one.modules()}
        mixing = (one for one in stateful if apart.isdisjoint(one.modules()))
        names = (next((type(one).__name__ for one in found), "") for found in (stateful, mixing))
        scaled_from = (_scaled_from(one) for one in model.modules())
        return cls(_is_relative(model), next(filter(None, scaled_from), 0), *names)


_natures: WeakKeyDictionary[nn.Module, Nature] = WeakKeyDictionary()  # a search takes milliseconds


def nature_of(model: nn.Module) -> Nature:
    if model not in _natures:
        _natures[model] = Nature.of(model)
    return _natures[model]


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
