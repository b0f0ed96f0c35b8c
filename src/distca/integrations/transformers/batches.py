"""Batches as transformers' collators make them: their documents, their plans, and fillers.

Packed in one row with ``position_ids`` that restart, or with ``cu_seq_lens_*`` too
(``DataCollatorWithFlattening``); or rows of one document each.

Legend: B rows, S tokens in a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from distca.integrations.shared.lengths import (
    lengths_of_offsets,
    lengths_of_starts,
    starts_of_positions,
)
from distca.integrations.shared.planned import Promise

PLANNED = "distca_batch"  # the keyword by which a batch brings its plans to the layers
IGNORED = -100  # the label of a token that teaches nothing

PADDED = (
    "is given padding, which is not planned for: pack documents instead of padding them"
    " (transformers' DataCollatorWithFlattening), and give no attention_mask"
)


def lengths_of(batch: Mapping[str, Any]) -> list[int]:
    """The documents of a batch on its way to the model."""
    mask = batch.get("attention_mask")
    if isinstance(mask, Tensor) and not bool(mask.all()):
        raise ValueError(f"the batch {PADDED}")
    tokens = next((batch[name] for name in ("input_ids", "inputs_embeds") if name in batch), None)
    if tokens is None:
        raise ValueError(f"a batch of {', '.join(batch)} has neither input_ids nor inputs_embeds")
    if not tokens.numel():
        raise ValueError("a batch without tokens: leave it out, plan_ahead fills in for it")
    return documents(tokens.shape[0], tokens.shape[1], batch)


def documents(
    num_rows: int, num_tokens: int, given: Mapping[str, Any], starts: Tensor | None = None
) -> list[int]:
    """Lengths by what the model was given; ``starts`` [B, S]: where its mask starts a document."""
    offsets, others = given.get("cu_seq_lens_q"), given.get("cu_seq_lens_k")
    if offsets is not None:
        if others is not None and others is not offsets and not torch.equal(others, offsets):
            raise ValueError("cu_seq_lens_q and cu_seq_lens_k differ: attention is to itself only")
        return lengths_of_offsets(offsets, num_rows * num_tokens)
    positions = given.get("position_ids")
    if positions is not None:
        if positions.ndim == 3 and len(positions) == 4:  # of text, time, height, width
            positions = positions[0]
        if positions.ndim != 2 or positions.shape[1] != num_tokens:
            raise ValueError(
                f"position_ids of shape {tuple(positions.shape)} for {num_rows} rows of"
                f" {num_tokens} tokens: give one position for each, or cu_seq_lens_q too"
            )
        restarts = starts_of_positions(positions).expand(num_rows, -1)
        starts = restarts if starts is None else starts | restarts
    if starts is None:
        return [num_tokens] * num_rows
    return lengths_of_starts(starts)


def attach(batch: Mapping[str, Any], promise: Promise) -> dict[str, Any]:
    return {**batch, PLANNED: promise}


def filler(last: Mapping[str, Any] | None) -> dict[str, Any]:
    """A batch of one token that nobody learns from, like the last one in kind.

    Its loss is 0 and not the mean over no targets: transformers' loss divides by the given number.
    """
    one = torch.zeros(1, 1, dtype=torch.int64)
    batch: dict[str, Any] = {"input_ids": one, "position_ids": one}
    batch |= {"labels": torch.full_like(one, IGNORED), "num_items_in_batch": 1}
    for name in last or ():
        if name.startswith("cu_seq_lens"):
            batch[name] = torch.tensor([0, 1], dtype=torch.int32)
        elif name.startswith("max_length"):
            batch[name] = 1
        elif name == "attention_mask":
            batch[name] = torch.ones_like(one)
    return batch
