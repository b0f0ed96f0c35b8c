"""The backends of one ``CoreAttention``: chosen once for each kind of tensors and masks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from distca.attention.backends.base import Backend, Scoring, Traits, kind_of
from distca.attention.backends.choice import choose
from distca.attention.backends.first_call import load_kernels
from distca.dispatch.tensors import TensorSpec
from distca.planning.masks import Mask
from distca.planning.plan import Plan


class _Kind(NamedTuple):
    """What a backend is chosen for."""

    spec: TensorSpec
    masks: frozenset[str]


class ChosenBackends:
    """name: of a backend, or ``auto``; it must support the other options."""

    def __init__(self, name: str, *, softcap: float, deterministic: bool) -> None:
        self._name, self._softcap, self._deterministic = name, softcap, deterministic
        self._chosen: dict[_Kind, Backend] = {}
        self._loaded: set[tuple[_Kind, bool]] = set()

    def of(
        self, spec: TensorSpec, plans: Sequence[Plan], scale: float, *, backward: bool
    ) -> Backend:
        """Returns the backend for tensors and for the masks of plans; on a GPU, it is loaded.

        backward: whether its kernels for gradients are used as well.
        """
        masks = {Mask(reach) for plan in plans for reach in set(plan.reach.tolist())}
        kind = _Kind(spec, frozenset(map(kind_of, masks)))
        if kind not in self._chosen:
            self._chosen[kind] = self._choose(spec, masks)
        backend = self._chosen[kind]
        if spec.device.type == "cuda" and (kind, backward) not in self._loaded:
            scoring = Scoring(scale, self._softcap)
            with torch.cuda.device(spec.device):  # of this thread, which may be one that plans
                load_kernels(backend, spec, kind.masks, scoring, backward=backward)
            self._loaded.add((kind, backward))
        return backend

    def _choose(self, spec: TensorSpec, masks: Iterable[Mask]) -> Backend:
        softcap, deterministic = self._softcap > 0, self._deterministic
        traits = Traits.of(spec, masks, deterministic=deterministic, softcap=softcap)
        return choose(self._name, traits)
