"""The factors of keys and values in latent attention (MLA), which travel instead of them.

Legend: T token rows, G key/value heads, D head size of queries and keys, V that of values, R size
of a latent, E size of the rotary part of a key, which all heads share.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from distca.dispatch.tensors import TensorSpec, wide

_MOST_DIFFERENT = 0.05  # rounding makes less of a difference, another order of rows makes more


class Latent(NamedTuple):
    """The factors of keys and values: k = [latent Wk', rotary], v = latent Wv', for every head.

    weight: rows are by head, first those of its key (Wk) and then those of its value (Wv), as in
        the ``kv_b_proj`` of DeepSeek-V2 and V3.
    """

    latent: Tensor  # [T, R]
    rotary: Tensor  # [T, E]
    weight: Tensor  # [G * (D - E + V), R]

    def expand(self, spec: TensorSpec) -> tuple[Tensor, Tensor]:
        """Returns the keys [T, G, D] and values [T, G, V]."""
        plain = spec.head_dim - spec.rope_dim
        both = (self.latent @ self.weight.t()).view(-1, spec.kv_heads, plain + spec.v_head_dim)
        rotary = self.rotary[:, None].expand(-1, spec.kv_heads, -1)
        return torch.cat([both[..., :plain], rotary], -1), both[..., plain:]

    def differentiate(self, dk: Tensor, dv: Tensor) -> Latent:
        """Returns the gradients of all three, from those of keys and values."""
        plain = dk.shape[2] - self.rotary.shape[1]
        both = torch.cat([dk[..., :plain], dv], -1).flatten(1)  # [T, G * (D - E + V)]
        rotary = dk[..., plain:].sum(1, dtype=wide(dk.dtype)).to(dk.dtype)
        return Latent(both @ self.weight, rotary, both.t() @ self.latent)


NO_LATENT = (
    "latents are given without the matrix that expands them: pass distca.Latent(latent, rotary,"
    " weight)"
)


def is_latent(given: object) -> bool:
    return isinstance(given, Latent) and all(isinstance(each, Tensor) for each in given)


def refusal(given: Latent, spec: TensorSpec, num_tokens: int) -> str:
    """Returns why these are not the factors of keys and values; empty if they are."""
    for name, tensor in zip(given._fields, given, strict=True):
        if tensor.ndim != 2 or tensor.dtype != spec.dtype or tensor.device.type != spec.device.type:
            return (
                f"{name} of the latents has shape {tuple(tensor.shape)} and is {tensor.dtype} on"
                f" {tensor.device}: it must have two dimensions, and the dtype and device of q,"
                f" {spec.dtype} on {spec.device}"
            )
    latent, rotary, weight = (tuple(each.shape) for each in given)
    if (len(given.latent), len(given.rotary)) != (num_tokens, num_tokens):
        return (
            f"latents {latent} and rotary parts {rotary} for {num_tokens} keys: give one row of"
            " each for every key"
        )
    plain = spec.head_dim - rotary[1]
    needed = (spec.kv_heads * (plain + spec.v_head_dim), latent[1])
    if plain < 1 or weight != needed:
        return (
            f"a matrix {weight} expands latents of {latent[1]} to {spec.kv_heads} heads with keys"
            f" of {spec.head_dim}, of which {rotary[1]} are rotary, and values of"
            f" {spec.v_head_dim}: it must be {needed}"
        )
    return ""


def difference(given: Latent, spec: TensorSpec, k: Tensor, v: Tensor) -> str:
    """Returns how the first key and value differ from their factors; empty if they do not."""
    with torch.no_grad():
        first = Latent(given.latent[:1], given.rotary[:1], given.weight).expand(spec)
        for name, found, right in zip("kv", first, (k[:1], v[:1]), strict=True):
            error = float((found - right).float().norm() / right.float().norm().clamp_min(1e-30))
            if error > _MOST_DIFFERENT:
                return (
                    f"{name} is not what the latents expand to (the first row differs by"
                    f" {error:.1g} of its norm): rows of the matrix are by head, first those of its"
                    " key and then those of its value, and rotary parts are last in a key"
                )
    return ""


def no_latent(spec: TensorSpec) -> Latent | None:
    """Returns the factors of a rank without tokens and without weights, if latents travel."""
    if not spec.latent_dim:
        return None
    sizes = (0, spec.latent_dim), (0, spec.rope_dim), (0, spec.latent_dim)
    return Latent(*(torch.empty(*size, dtype=spec.dtype, device=spec.device) for size in sizes))
