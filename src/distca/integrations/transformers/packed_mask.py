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
from itertools import accumulate
from typing import Any, NoReturn

import torch
from torch import Tensor

from distca.integrations.shared.documents import num_tokens, two_way_spans
from distca.integrations.transformers.batches import NUMBERED, refused_values
from distca.integrations.transformers.calls import PreparedMask, in_progress
from distca.integrations.transformers.masks import read_mask, read_parts, visibility
from distca.integrations.transformers.model_call import ModelCall
from distca.integrations.transformers.refusals import WAY_OUT
from distca.planning.entries import Entry
from distca.planning.masks import BAND, CAUSAL, FULL, Mask

_UNSUPPORTED = (
    "has a mask that is none of those that distca supports for whole documents: causal, a sliding"
    " window, chunks, full, a band, or two-way spans"
)


class ForeignMaskError(AttributeError, TypeError, ValueError):
    """A model computes with its masks, which only works with tensors."""


class PackedMask(PreparedMask):
    """The mask of some layers in one call of a model, without its values.

    It is not a dataclass, since FSDP1 copies dataclasses for every layer.
    """

    def __init__(self, call: ModelCall, mask: Mask) -> None:
        self.call, self.mask = call, mask
        # On the host:
        self.starts: Tensor | None = None  # [B, S], where transformers' mask starts a document
        self.ahead: Tensor | None = None  # [B, S], where it shows a query the next key
        self.error = ""  # why distca cannot compute these layers

    @property
    def is_both_ways(self) -> bool:
        """Whether all queries see keys behind them, as in encoders."""
        return self.mask.reach == FULL or self.mask.reach > BAND

    def check(self, documents: Sequence[Entry]) -> None:
        """Raises if transformers' mask is not that of these documents."""
        if self.starts is None:
            return
        starts, self.starts = self.starts.flatten(), None
        begins = list(accumulate(map(num_tokens, documents), initial=0))
        if (total := begins.pop()) != len(starts):
            raise ValueError(
                f"is given {len(starts)} tokens, but documents of {total} were planned:"
                " leave a batch as it is after plan_ahead"
            )
        self._check_two_way(documents, begins)
        starts[begins] = False
        if starts.any():  # the mask hides more than other documents
            raise ValueError(
                f"{_UNSUPPORTED}, or its position_ids restart where neither cu_seq_lens_q nor the"
                f" plan starts a document: give a consistent batch, or {WAY_OUT}"
            )

    def _check_two_way(self, documents: Sequence[Entry], begins: Sequence[int]) -> None:
        if self.ahead is None:
            return
        ahead, self.ahead = self.ahead.flatten(), None
        planned = torch.zeros_like(ahead)
        for begin, entry in zip(begins, documents, strict=True):
            for start, stop in two_way_spans(entry, self.mask):
                planned[begin + start : begin + stop - 1] = True
        ahead[[begin - 1 for begin in begins[1:]]] = False
        if not torch.equal(ahead, planned):
            raise ValueError(
                "has a mask with other two-way spans than the batch was planned with: add them by"
                " tell_two_way before plan_ahead, or do not plan ahead"
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
        whole documents, unless it would mix documents; else the layers raise the error.
        """
        models = in_progress()
        if models and isinstance(prepared := models[-1].prepared, PackedMask):
            models[-1].took_prepared = True
            return prepared
        call = self._call(asked)
        packed = PackedMask(call, _kind(asked))
        if packed.is_both_ways and models and not call.is_of_tokens(models):
            return None  # of an encoder of images or sounds
        num_keys, padding = asked["kv_length"], asked.get("attention_mask")
        refused = "" if padding is None else refused_values(call.as_given(padding))
        if num_keys != call.num_tokens or asked.get("q_offset"):
            packed.error = (
                f"has {num_keys} keys for {call.num_tokens} queries: train without a cache, and"
                " give none with several documents in a row"
            )
        else:
            packed.error = refused or _read(packed, asked)
        if refused == NUMBERED:
            packed.error = NUMBERED
        elif packed.error and not call.grad_enabled and not call.holds_several(_own(asked, call)):
            return None
        return packed

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


def _own(asked: Mapping[str, Any], call: ModelCall) -> Tensor:
    """[B, S] Returns which tokens are not padding; transformers' mask is for those before, too."""
    size, padding = (call.num_rows, call.num_tokens), asked.get("attention_mask")
    if padding is not None:
        first = asked["q_offset"] if "q_offset" in asked else asked["cache_position"][0]
        own: Tensor = padding[:, int(first) :][:, : call.num_tokens].cpu()
        if own.shape == size:
            return own
    return torch.ones(size, dtype=torch.bool)


def _kind(asked: Mapping[str, Any]) -> Mask:
    """Returns the mask by what transformers says, which is the same on all ranks."""
    config, size = asked.get("config"), asked.get("local_size")
    if "allow_is_bidirectional_skip" in asked:
        return Mask(FULL if size is None else BAND + size)
    if asked.get("use_vmap"):  # the model adds a function of its own, as Gemma 3 does
        if getattr(config, "use_bidirectional_attention", None) is True:
            return Mask(FULL if size is None else BAND + size - 1)  # counts the query's own key
        if size is None:  # a window over two-way spans
            size = getattr(config, "sliding_window", None)
    if size is not None and size == getattr(config, "attention_chunk_size", None):
        return Mask(-size)
    return Mask(CAUSAL if size is None else size)


def _read(packed: PackedMask, asked: Mapping[str, Any]) -> str:
    """Reads the documents and two-way spans of a mask; returns why distca cannot compute it."""
    call, mask = packed.call, packed.mask
    if packed.is_both_ways and call.models and not call.is_of_tokens(call.models[-1:]):
        return f"may attend to something else than the model's tokens: {WAY_OUT}"
    if packed.is_both_ways and any(
        model.given.get("encoder_hidden_states") is not None for model in call.models
    ):
        return f"attends to an encoder, which distca does not support: {WAY_OUT}"
    function, size = asked["mask_function"], (call.num_rows, call.num_tokens)
    read = read_parts(function, mask, size)
    if read is None:
        given = asked["device"] if "device" in asked else asked["cache_position"].device
        device, one_by_one = torch.device(given), bool(asked.get("use_vmap"))
        visible = visibility(function, size, device, one_by_one=one_by_one)
        read = read_mask(visible, mask, call.told_starts(device))
    if read is None:
        return f"{_UNSUPPORTED}: {WAY_OUT}"
    packed.starts = read.starts
    if packed.is_both_ways:
        return ""
    packed.ahead = read.ahead
    if not bool(read.ahead.any()):
        return ""
    if mask.reach < 0:
        return f"has two-way spans in chunks, which distca does not support: {WAY_OUT}"
    if call.ahead is not None and not torch.equal(call.ahead, read.ahead):
        return f"has other two-way spans than layers before it: {WAY_OUT}"
    call.ahead = read.ahead
    call.two_way_masks.add(str(mask))
    return ""
