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
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NoReturn

import torch
from torch import Tensor

from distca.integrations.shared.documents import TWO_WAY_MASKS, num_tokens, two_way_spans
from distca.integrations.shared.planned import BatchFuture
from distca.integrations.shared.planned_batch import PlannedBatch
from distca.integrations.transformers.batches import (
    DOCUMENTS,
    PADDED,
    PLANNED,
    documents,
    tells_documents,
    with_two_way,
)
from distca.integrations.transformers.calls import Calls, PreparedMask, in_progress
from distca.integrations.transformers.masks import read_mask, read_parts, visibility
from distca.integrations.transformers.refusals import WAY_OUT, refuse_packed
from distca.planning.masks import BAND, CAUSAL, FULL, Mask
from distca.planning.placement import Entry

_UNSUPPORTED = (
    "has a mask that is none of those that distca supports for whole documents: causal, a sliding"
    " window, chunks, full, a band, or two-way spans"
)


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
    ahead: Tensor | None = None  # [B, S] queries in two-way spans that see the next key
    two_way_masks: set[str] = field(default_factory=set)  # masks that show these spans

    def has_same_masks(self, other: ModelCall) -> bool:
        sizes = (self.grad_enabled, self.num_rows, self.num_tokens, self.models)
        others = (other.grad_enabled, other.num_rows, other.num_tokens, other.models)
        return self.config is other.config and sizes == others

    def planned(self, given: Mapping[str, Any]) -> BatchFuture | None:
        """Returns the plans that the batch carries. given: the arguments of a layer."""
        carried = (source.get(PLANNED) for source in self._sources(given))
        return next((future for future in carried if future is not None), None)

    def check_packed(self, ranks: Sequence[Sequence[Entry]]) -> None:
        """Raises if the model mixes the documents of a row. ranks: the documents of each."""
        if max(map(len, ranks)) > self.num_rows:
            entries = (entry for documents in ranks for entry in documents)
            continued = any(not isinstance(entry, int) and "parent" in entry for entry in entries)
            refuse_packed(self.models, continued=continued)

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
        if self.ahead is None or told.get(DOCUMENTS) is not None:
            return found
        named = {TWO_WAY_MASKS: tuple(sorted(self.two_way_masks))}
        return list(with_two_way(found, self.ahead, named))

    def told_starts(self, device: torch.device) -> Tensor:
        """[B, S] Returns where the callers of models start documents; rows start one anyway."""
        starts = torch.zeros(self.num_rows * self.num_tokens, dtype=torch.bool, device=device)
        told = next(filter(tells_documents, self._sources({})), None)
        if told is not None:
            with suppress(ValueError):  # which is raised where documents are planned
                found = documents(self.num_rows, self.num_tokens, told)
                begins = list(accumulate(map(num_tokens, found), initial=0))[:-1]
                starts[torch.tensor(begins, device=device)] = True
        return starts.view(self.num_rows, self.num_tokens)

    def is_of_tokens(self, models: Calls) -> bool:
        """Tells whether some of the models are given the tokens that the mask is for."""
        size = (self.num_rows, self.num_tokens)
        return any(m.tokens is not None and m.tokens.shape[:2] == size for m in models)

    def _sources(self, given: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Returns what tells about these tokens: the arguments of models, then of the layer."""
        return [*(m.given for m in self.models if self.is_of_tokens((m,))), given]


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
        whole documents; with gradients the error is kept for the layers to raise.
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
        if num_keys != call.num_tokens or asked.get("q_offset"):
            packed.error = (
                f"has {num_keys} keys for {call.num_tokens} queries: train without a cache"
            )
        elif padding is not None and not bool(padding.all()):
            packed.error = PADDED
        else:
            packed.error = _read(packed, asked)
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
