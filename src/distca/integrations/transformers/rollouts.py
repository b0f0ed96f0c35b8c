"""Batches of rows that begin alike, such as the completions of a prompt in GRPO.

batch = collate_shared(rows)                   # rows with input_ids and labels
loss = model(**batch).loss                     # that of the rows, trained separately
logits = model(**batch).logits[0]
of_row = logits[batch_places(rows)[3]]         # [tokens of row 3, vocabulary]
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from distca.data.shared_prefixes import PackedRows, pack_rows
from distca.integrations.transformers.batches import DOCUMENTS


def collate_shared(features: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns one packed batch of the rows, in which the tokens that they begin with occur once.

    It takes the place of ``DataCollatorWithFlattening``: each feature has ``input_ids`` and, if a
    loss is wanted, ``labels``. Models with ``attn_implementation="distca"`` compute every row as if
    it were alone.
    """
    packed = _packed(features)
    batch: dict[str, Any] = {
        "input_ids": torch.from_numpy(packed.tokens)[None],
        "position_ids": torch.from_numpy(packed.positions)[None],
        DOCUMENTS: packed.documents,
    }
    if all("labels" in feature for feature in features):
        batch["labels"] = torch.from_numpy(packed.labels)[None]
    return batch


def batch_places(features: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    """Returns for each row where its tokens are in the batch of ``collate_shared``."""
    return [torch.from_numpy(places) for places in _packed(features).places]


def _packed(features: Sequence[Mapping[str, Any]]) -> PackedRows:
    rows = [feature["input_ids"] for feature in features]
    labels = [feature["labels"] for feature in features if "labels" in feature]
    return pack_rows(rows, labels if len(labels) == len(rows) else None)
