"""Batches of transformers' collators: their documents, their plans, and filler batches.

A batch is packed into one row whose ``position_ids`` restart with each document, possibly with
``cu_seq_lens_*`` too (``DataCollatorWithFlattening``); or each of its rows is one document.

Legend: B rows, S tokens in a row.
"""

import reprlib
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from distca.integrations.shared.documents import TWO_WAY_MASKS, num_tokens
from distca.integrations.shared.lengths import (
    lengths_of_offsets,
    lengths_of_starts,
    starts_of_positions,
)
from distca.integrations.shared.planned import BatchFuture
from distca.planning.entries import Entry

PLANNED = "distca_batch"  # the argument of the model under which a batch carries its plans
DOCUMENTS = "distca_documents"  # the one that tells documents which continue others
_IGNORED = -100  # the label of a token that is not in the loss

PADDED = (
    "is given padding, which distca does not support: pack documents instead of padding them"
    " (transformers' DataCollatorWithFlattening), and give no attention_mask"
)
NUMBERED = (
    "is given an attention_mask with other values than 0 and 1, which do not tell documents apart:"
    " give position_ids that restart, or cu_seq_lens_q and cu_seq_lens_k, and no attention_mask"
)


def documents_of(batch: Mapping[str, Any]) -> list[Entry]:
    mask = batch.get("attention_mask")
    if isinstance(mask, Tensor) and (refused := refused_values(mask)):
        raise ValueError(f"the batch {refused}")
    tokens = next((batch[name] for name in ("input_ids", "inputs_embeds") if name in batch), None)
    if tokens is None:
        raise ValueError(f"a batch of {', '.join(batch)} has neither input_ids nor inputs_embeds")
    if not tokens.numel():
        raise ValueError("a batch has no tokens: leave it out, plan_ahead adds filler batches")
    return documents(tokens.shape[0], tokens.shape[1], batch)


def refused_values(attention_mask: Tensor) -> str:
    """Returns why distca does not support the values of a mask [B, S]; "" if all are 1."""
    ones = attention_mask == 1
    if bool(ones.all()):
        return ""
    return PADDED if bool((ones | (attention_mask == 0)).all()) else NUMBERED


def tells_documents(given: Mapping[str, Any]) -> bool:
    """Tells whether arguments say where documents begin, also if that cannot be read."""
    names = (DOCUMENTS, "cu_seq_lens_q", "position_ids")
    return any(given.get(name) is not None for name in names)


def documents(
    num_rows: int, row_tokens: int, given: Mapping[str, Any], starts: Tensor | None = None
) -> list[Entry]:
    """Returns the documents, mostly as lengths, from what a model or a layer was given.

    starts: [B, S], true where the model's mask starts a document, if that is known; on the host.
    """
    if (told := given.get(DOCUMENTS)) is not None:
        if not isinstance(told, list | tuple) or not all(map(_is_document, told)):
            raise ValueError(
                f"{DOCUMENTS} are {reprlib.repr(told)}: give a list of lengths >= 1, or what"
                " pack_rows returns"
            )
        if (count := sum(map(num_tokens, told))) != num_rows * row_tokens:
            raise ValueError(
                f"{DOCUMENTS} have {count} tokens, but the batch has {num_rows * row_tokens}: give"
                " them as pack_rows returns them"
            )
        return list(told)
    if (offsets := given.get("cu_seq_lens_q")) is not None:
        total, others = num_rows * row_tokens, given.get("cu_seq_lens_k")
        lengths = lengths_of_offsets(offsets, total)
        others = None if others is offsets else others
        if others is not None and lengths_of_offsets(others, total) != lengths:
            raise ValueError("cu_seq_lens_q and cu_seq_lens_k differ: give the same for both")
        return [*lengths]
    if given.get("position_ids") is not None:
        positions = positions_of(num_rows, row_tokens, given["position_ids"])
        restarts = starts_of_positions(positions).cpu().expand(num_rows, -1)
        starts = restarts if starts is None else starts | restarts
    if starts is None:
        return [row_tokens] * num_rows
    return [*lengths_of_starts(starts)]


def _is_document(entry: object) -> bool:
    return entry >= 1 if isinstance(entry, int) else isinstance(entry, Mapping)


def positions_of(num_rows: int, row_tokens: int, positions: Tensor) -> Tensor:
    """Returns the positions of text [B or 1, S] from ``position_ids``."""
    if positions.ndim == 3 and len(positions) == 4:  # of text, time, height, width
        positions = positions[0]
    if positions.ndim != 2 or positions.shape[1] != row_tokens:
        raise ValueError(
            f"position_ids of shape {tuple(positions.shape)} for {num_rows} rows of"
            f" {row_tokens} tokens: give one position for each token, or cu_seq_lens_q too"
        )
    return positions


def tell_two_way(
    batch: Mapping[str, Any], inside: Tensor, masks: Sequence[str] | None = None
) -> dict[str, Any]:
    """Returns a batch that tells its two-way spans, such as images, before it is planned ahead.

    inside: [B, S] true for tokens of spans. Neighbours inside a document are one span, as in
        transformers' models: ``batch["token_type_ids"] == 1`` for Gemma 3.
    masks: those whose layers have the spans, such as ``["window:512"]``; by default all.
    """
    following = torch.cat([inside[:, 1:], torch.zeros_like(inside[:, :1])], 1)
    named = {} if masks is None else {TWO_WAY_MASKS: tuple(masks)}
    return {**batch, DOCUMENTS: with_two_way(documents_of(batch), inside & following, named)}


def with_two_way(
    found: Sequence[Entry], ahead: Tensor, named: Mapping[str, Any]
) -> tuple[Entry, ...]:
    """Returns documents with their two-way spans.

    ahead: [B, S] queries that see the next key; whether the last one of a document does is ignored
    named: what to tell besides about documents that have spans
    """
    sees = ahead.flatten().cpu().clone()
    ends = torch.tensor([*accumulate(map(num_tokens, found))])
    sees[ends - 1] = False
    edges = sees.int().diff(prepend=torch.zeros(1), append=torch.zeros(1))
    first, last = ((edges == edge).nonzero().flatten() for edge in (1, -1))
    spans: dict[int, list[tuple[int, int]]] = {}
    rows = (torch.searchsorted(ends, first, right=True), first, last + 1)
    for number, start, stop in zip(*(row.tolist() for row in rows), strict=True):
        entry = found[number]
        begin = int(ends[number]) - num_tokens(entry)
        begin -= 0 if isinstance(entry, int) else entry.get("prefix", 0)
        spans.setdefault(number, []).append((start - begin, stop - begin))
    return tuple(
        {**({"length": entry} if isinstance(entry, int) else entry), "two_way": of, **named}
        if (of := spans.get(number))
        else entry
        for number, entry in enumerate(found)
    )


def attach(batch: Mapping[str, Any], future: BatchFuture) -> dict[str, Any]:
    return {**batch, PLANNED: future}


def filler(last: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns a batch of one ignored token, with the same arguments as the last batch.

    Its loss is 0 instead of a mean over no targets, because transformers' loss divides by
    ``num_items_in_batch``.
    """
    one = torch.zeros(1, 1, dtype=torch.int64)
    batch: dict[str, Any] = {"input_ids": one, "position_ids": one}
    batch |= {"labels": torch.full_like(one, _IGNORED), "num_items_in_batch": 1}
    if last and DOCUMENTS in last:
        batch[DOCUMENTS] = (1,)
    for name in last or ():
        if name.startswith("cu_seq_lens"):
            batch[name] = torch.tensor([0, 1], dtype=torch.int32)
        elif name.startswith("max_length"):
            batch[name] = 1
        elif name == "attention_mask":
            batch[name] = torch.ones_like(one)
    return batch
