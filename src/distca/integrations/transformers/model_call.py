"""What the layers of one forward pass share: the documents and plans of its batch.

Legend: B rows, S tokens in a row.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from distca.integrations.shared.documents import TWO_WAY_MASKS, num_tokens
from distca.integrations.shared.planned import BatchFuture
from distca.integrations.shared.planned_batch import PlannedBatch
from distca.integrations.transformers.batches import (
    DOCUMENTS,
    PLANNED,
    documents,
    positions_of,
    tells_documents,
    with_two_way,
)
from distca.integrations.transformers.calls import Calls
from distca.integrations.transformers.refusals import refuse_packed
from distca.planning.entries import Entry


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
        found = next((future for future in carried if future is not None), None)
        if found is not None and not isinstance(found, Future):
            raise ValueError(f"{PLANNED} is {reprlib.repr(found)}: leave it as plan_ahead gives it")
        return found

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

    def holds_several(self, own: Tensor) -> bool:
        """Tells whether callers of models put several documents in a row, or lengths unreadably.

        own: [B, S] which tokens are not padding; only these have positions that mean something
        """
        told = next(filter(tells_documents, self._sources({})), None)
        if told is None:
            return False
        size = (self.num_rows, self.num_tokens)
        if told.get(DOCUMENTS) is not None or told.get("cu_seq_lens_q") is not None:
            starts = self.told_starts(own.device)
            if not starts[0, 0]:  # they cannot be read
                return True
            number = starts.flatten().cumsum(0).view(size)
        else:
            try:
                positions = positions_of(*size, told["position_ids"]).to(own.device)
            except ValueError:  # three positions for each token
                return False
            number = positions - own.cumsum(1)  # [B, S] constant in a document
        first = own.int().argmax(1, keepdim=True)
        return bool((own & (number != number.gather(1, first))).any())

    def as_given(self, padding: Tensor) -> Tensor:
        """Returns the ``attention_mask`` that transformers has converted to bool.

        The innermost model was given it; one outside may have another for its encoder.
        """
        given = (source.get("attention_mask") for source in reversed(self._sources({})))
        known = (mask for mask in given if isinstance(mask, Tensor) and mask.shape == padding.shape)
        return next(known, padding)

    def is_of_tokens(self, models: Calls) -> bool:
        """Tells whether some of the models are given the tokens that the mask is for."""
        return any(model.is_of(self.num_rows, self.num_tokens) for model in models)

    def _sources(self, given: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Returns what tells about these tokens: the arguments of models, then of the layer."""
        return [*(m.given for m in self.models if self.is_of_tokens((m,))), given]
