"""The object that layers get in place of a mask.

[Note: packed masks] transformers calls a mask function once per forward pass and kind of mask,
before all layers, and passes its result to every layer, also to a layer that is recomputed in the
backward pass. Ours returns a PackedMask: it refers to the call of the model that the layer belongs
to, which holds the plans of the batch. So a recomputed layer finds the plans of its own batch,
whatever the model has computed since.

Legend: B rows, S tokens in a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NoReturn

import torch
from torch import Tensor

from distca.integrations.shared.planned import BatchFuture, PlannedBatch
from distca.integrations.transformers.batches import PADDED, PLANNED, documents, tells_documents
from distca.integrations.transformers.calls import Calls, in_progress
from distca.integrations.transformers.masks import document_starts
from distca.integrations.transformers.refusals import WAY_OUT, refuse_packed
from distca.planning.masks import CAUSAL, Mask
from distca.planning.placement import Entry

_UNSUPPORTED = "has a mask that is neither causal nor a sliding window of documents"


class ForeignMaskError(AttributeError, TypeError, ValueError):
    """A model computes with its masks, which only works with tensors."""


@dataclass(eq=False)
class ModelCall:
    """One forward pass of a model."""

    config: object
    grad_enabled: bool  # before the first layer: inside, checkpointing may turn it off
    num_rows: int
    num_tokens: int  # in a row
    models: Calls = ()  # the model and those that contain it
    batch: PlannedBatch | None = None  # set by the first layer

    def has_same_masks(self, other: ModelCall) -> bool:
        sizes = (self.grad_enabled, self.num_rows, self.num_tokens, self.models)
        others = (other.grad_enabled, other.num_rows, other.num_tokens, other.models)
        return self.config is other.config and sizes == others

    def planned(self, given: Mapping[str, Any]) -> BatchFuture | None:
        """Returns the plans that the batch carries. given: the arguments of a layer."""
        carried = (source.get(PLANNED) for source in self._sources(given))
        return next((future for future in carried if future is not None), None)

    def check_packed(self, most_documents: int) -> None:
        """Raises if the model mixes the documents of a row. most_documents: of any rank."""
        if most_documents > self.num_rows:
            refuse_packed(self.models)

    def documents(self, given: Mapping[str, Any], starts: Tensor | None) -> list[Entry]:
        """Returns the documents, by what the outermost model that tells was given.

        starts: where the mask starts documents. It ignores positions if there is a cache or an
            attention_mask, and some layers get none, but the caller of the model has said them.
        """
        sources = self._sources(given)
        told = next(filter(tells_documents, sources), sources[-1])
        found = documents(self.num_rows, self.num_tokens, told, starts)
        known = self.models or tells_documents(told) or len(found) > self.num_rows
        if self.grad_enabled and not known:
            raise ValueError(
                "cannot tell where documents begin: call the layers by their model, wrap the"
                " loader with plan_ahead, or give cu_seq_lens_q"
            )
        return found

    def _sources(self, given: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Returns what tells about these tokens: the arguments of models, then of the layer."""
        size = (self.num_rows, self.num_tokens)
        models = [m for m in self.models if m.tokens is not None and m.tokens.shape[:2] == size]
        return [*(model.given for model in models), given]


class PackedMask:
    """The mask of some layers in one call of a model, without its values.

    It is not a dataclass, since FSDP1 copies dataclasses for every layer.
    """

    def __init__(self, call: ModelCall, mask: Mask) -> None:
        self.call, self.mask = call, mask
        self.starts: Tensor | None = None  # [B, S], where transformers' mask starts a document
        self.error = ""  # why distca cannot compute these layers

    def check(self, lengths: Sequence[int]) -> None:
        """Raises if transformers' mask is not that of documents of these lengths."""
        if self.starts is None:
            return
        starts, self.starts = self.starts.flatten().cpu(), None
        begins = list(accumulate(lengths, initial=0))
        if begins.pop() != len(starts):
            raise ValueError(
                f"is given {len(starts)} tokens, but documents of {sum(lengths)} were planned:"
                " leave a batch as it is after plan_ahead"
            )
        starts[begins] = False
        if starts.any():  # the mask hides more than other documents
            raise ValueError(
                f"{_UNSUPPORTED}, or its position_ids restart where neither cu_seq_lens_q nor the"
                f" plan starts a document: give a consistent batch, or {WAY_OUT}"
            )

    def __getattr__(self, name: str) -> NoReturn:
        raise ForeignMaskError(
            f"this model computes with its masks ({name}), which distca does not support: {WAY_OUT}"
        )

    def __getitem__(self, _: Any) -> NoReturn:
        self.__getattr__("indexing")

    def _compute(self, *_: Any) -> NoReturn:
        self.__getattr__("arithmetic")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __invert__ = _compute

    @classmethod
    def __torch_function__(cls, function: Any, *_: Any) -> NoReturn:
        cls.__new__(cls).__getattr__(getattr(function, "__name__", "arithmetic"))


class PackedMaskFactory:
    """Makes the masks of a model's forward passes, one model call after another."""

    def __init__(self) -> None:
        self._latest: ModelCall | None = None

    def __call__(self, asked: Mapping[str, Any]) -> PackedMask | None:
        """Returns the mask for the arguments of ``sdpa_mask``, which depend on its version.

        Returns None without gradients if distca does not support the mask, or if it is not one of
        whole documents; with gradients the error is kept for the layers to raise.
        """
        call, window = self._call(asked), asked.get("local_size")
        packed = PackedMask(call, Mask(CAUSAL if window is None else window))
        num_keys, padding = asked["kv_length"], asked.get("attention_mask")
        if num_keys != call.num_tokens or asked.get("q_offset"):
            packed.error = (
                f"has {num_keys} keys for {call.num_tokens} queries: train without a cache"
            )
        elif padding is not None and not bool(padding.all()):
            packed.error = PADDED
        else:
            packed.starts = _starts(asked, call, packed.mask)
            packed.error = f"{_UNSUPPORTED}: {WAY_OUT}" if packed.starts is None else ""
        return None if packed.error and not call.grad_enabled else packed

    def _call(self, asked: Mapping[str, Any]) -> ModelCall:
        """Returns the call that the mask is for: a model may ask for several kinds of masks."""
        num_tokens = asked.get("q_length")
        if num_tokens is None:  # transformers 4
            num_tokens = asked["cache_position"].shape[0]
        rows, grad = asked["batch_size"], torch.is_grad_enabled()
        new = ModelCall(asked.get("config"), grad, rows, num_tokens, in_progress())
        latest = self._latest
        if latest is None or latest.batch is not None or not latest.has_same_masks(new):
            latest = self._latest = new
        return latest


def _starts(asked: Mapping[str, Any], call: ModelCall, mask: Mask) -> Tensor | None:
    if asked.get("use_vmap"):  # the model's own function, which takes one index at a time
        return None
    if mask.reach == getattr(call.config, "attention_chunk_size", None):
        return None
    device = asked["device"] if "device" in asked else asked["cache_position"].device
    size = (call.num_rows, call.num_tokens)
    return document_starts(asked["mask_function"], *size, mask.reach, torch.device(device))
