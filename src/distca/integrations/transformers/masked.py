"""Attention of one rank under a mask of transformers: with a cache, padding or a mask of its own.

It is used without gradients, and by layers that are not causal, such as those of an image encoder.

Legend: B rows, H heads, G key/value heads, n queries, m keys, D head size.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from distca.dispatch.tensors import wide


def attend_masked(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    given: Mapping[str, Any],
) -> Tensor:
    """Returns [B, n, H, D] of query [B, H, n, D], key and value [B, G, m, D].

    transformers' sdpa computes it, or plain arithmetic if there are sinks or soft caps, which sdpa
    does not support.

    mask: [B or 1, 1, n, m] the visible keys as bool, or what is added to the scores. None: causal
        for several queries, if the layer is.
    """
    sinks, softcap = given.get("s_aux"), given.get("softcap")
    if sinks is None and softcap is None:
        options = {"scaling": scaling, **given}
        out: Tensor = sdpa_attention_forward(module, query, key, value, mask, **options)[0]
        return out
    group = query.shape[1] // key.shape[1]
    q, k, v = (x.to(wide(query.dtype)) for x in (query, key, value))
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = q @ k.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = _masked(scores, mask, _is_causal(module, given))
    if sinks is not None:  # one more key, without a value
        column = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1)[..., : key.shape[2]]
    return (weights @ v).transpose(1, 2).to(query.dtype).contiguous()


def _is_causal(module: nn.Module, given: Mapping[str, Any]) -> bool:
    causal = given.get("is_causal")
    return bool(getattr(module, "is_causal", True) if causal is None else causal)


def _masked(scores: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    num_queries, num_keys = scores.shape[-2:]
    if mask is None and (num_queries == 1 or not causal):
        return scores
    if mask is None:  # from the first key on: an empty cache of fixed size has more keys
        mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=scores.device).tril()
    if mask.dtype == torch.bool:
        # Not minus infinity: a padded query that sees no key would be NaN.
        return scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return scores + mask
