"""The latents of models with latent attention (MLA), such as DeepSeek-V2 and V3.

[Note: latents] Layers of transformers expand latents to keys and values with a method
``expand_kv``, before they call an attention function. ``remember`` extends that method of their
classes: the keys that it returns carry their factors, which ``latent_of`` reads. A layer whose
``kv_b_proj`` is no plain matrix at hand (LoRA, a quantized or sharded one) sends keys and values.

Legend: B rows, S tokens in a row, G heads, R size of a latent, E size of the rotary part of a key.
"""

from __future__ import annotations

from functools import wraps
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from distca.dispatch.latent import Latent

_EXPAND, _FACTORS = "expand_kv", "_distca_latent"
_seen: WeakSet[nn.Module] = WeakSet()  # models
_extended: set[type[nn.Module]] = set()


def remember(model: nn.Module) -> None:
    """Makes all layers of a model remember the factors of their keys. [Note: latents]"""
    if model in _seen:
        return
    _seen.add(model)
    kinds = {type(module) for module in model.modules() if hasattr(type(module), _EXPAND)}
    for kind in kinds - _extended:
        _extended.add(kind)
        setattr(kind, _EXPAND, _remembering(getattr(kind, _EXPAND)))


def latent_of(key: Tensor) -> Latent | None:
    """Returns the factors of keys [B, G, S, ...] and their values, with B x S rows, if known."""
    found: Latent | None = getattr(key, _FACTORS, None)
    if found is None:
        return None
    latent, rotary, weight = found  # [B, 1, S, R], [B, 1, S, E]
    return Latent(latent.flatten(0, 2), rotary.flatten(0, 2), weight)


def _remembering(expand: Any) -> Any:
    @wraps(expand)
    def expand_kv(self: Any, latent: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
        key, value = expand(self, latent, rotary)
        if not torch.compiler.is_compiling() and _is_plain_matrix(self.kv_b_proj):
            setattr(key, _FACTORS, Latent(latent, rotary, self.kv_b_proj.weight))
        return key, value

    return expand_kv


def _is_plain_matrix(linear: nn.Module) -> bool:
    if type(linear) is not nn.Linear or linear.bias is not None:
        return False
    weight = linear.weight
    whole = weight.shape == (linear.out_features, linear.in_features)
    return whole and type(weight) in (Tensor, nn.Parameter)
