"""Micro-batches as Megatron-Core brings them: their documents, and the plans they carry.

[Note: tickets] Plans are made once per micro-batch, and every layer must find them, also when it
is recomputed in backward while other micro-batches are under way. The one object that Megatron
hands to every layer, and keeps for recomputation, is the micro-batch's ``PackedSeqParams``: plans
are kept on it, as a ticket, and live as long as it does.

Legend: B rows, S tokens in a row on this rank, C ranks of a context-parallel group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from distca.integrations.shared.lengths import lengths_of_offsets, lengths_of_starts
from distca.integrations.shared.planned import Promise
from distca.planning.placement import Entry

_TICKET = "distca_ticket"
_NUMBERS = 1 << 32  # document numbers for each context-parallel group


@dataclass
class Ticket:
    """The plans of a micro-batch, and which layers have come with it so far."""

    promise: Promise
    local: bool  # of this rank alone, whatever the others do
    learned: dict[Any, bool] = field(default_factory=dict)  # by layer: whether with gradients

    def visit(self, layer: Any) -> bool:
        """Whether it is the layer's turn: once forward, and once more to be recomputed.

        What is recomputed ran without gradients first, and has them now.
        """
        learns, first = torch.is_grad_enabled(), layer not in self.learned
        fits = first or (learns and not self.learned[layer])
        self.learned[layer] = learns
        return fits


def ticket_of(packed: PackedSeqParams) -> Ticket | None:
    ticket: Ticket | None = vars(packed).get(_TICKET)
    return ticket


def keep_ticket(packed: PackedSeqParams, ticket: Ticket) -> Ticket:
    setattr(packed, _TICKET, ticket)
    return ticket


def lengths_of(packed: PackedSeqParams) -> list[int] | None:
    """Whole documents, with the padding behind each of them; None where there are no offsets.

    Padding counts as the end of its document: it is attended to by nobody but itself.
    """
    q, kv = (
        padded if padded is not None else offsets
        for padded, offsets in (
            (packed.cu_seqlens_q_padded, packed.cu_seqlens_q),
            (packed.cu_seqlens_kv_padded, packed.cu_seqlens_kv),
        )
    )
    if q is None:
        return None
    if kv is not None and kv is not q and not torch.equal(q, kv):
        raise ValueError("cu_seqlens_q and cu_seqlens_kv differ: attention is to itself only")
    return lengths_of_offsets(q, int(q[-1]))


def head_and_tail(lengths: Sequence[int], cp_rank: int, cp_size: int, home: int) -> list[Entry]:
    """The shards of documents that a context-parallel rank holds.

    Megatron cuts each into 2C chunks and gives rank i chunks i and 2C-1-i. ``home`` tells the
    documents of one group from those of the others.
    """
    if cp_size == 1:
        return list(lengths)
    shards: list[Entry] = []
    for number, length in enumerate(lengths):
        size, rest = divmod(length, 2 * cp_size)
        if rest:
            raise ValueError(
                f"document {number} has {length} tokens, which {cp_size} context-parallel ranks"
                f" cannot share: pad it to a multiple of {2 * cp_size} (cu_seqlens_q_padded)"
            )
        for chunk in (cp_rank, 2 * cp_size - 1 - cp_rank):
            start = chunk * size
            document = home * _NUMBERS + number
            shards.append({"document": document, "start": start, "stop": start + size})
    return shards


def lengths_of_mask(mask: Tensor, num_rows: int) -> list[int]:
    """[B or 1, 1, S, S], true where a key is hidden, as Megatron's datasets make it -> lengths.

    A document starts where a token does not see the one before. Anything but causal documents is
    refused.
    """
    hidden = mask.expand(num_rows, -1, -1, -1)
    size = hidden.shape[-1]
    starts = torch.zeros(num_rows, size, dtype=torch.bool, device=mask.device)
    starts[:, 1:] = hidden[:, 0].diagonal(-1, 1, 2)
    document = starts.cumsum(1)
    others = document[:, :, None] != document[:, None, :]
    later = torch.ones(size, size, dtype=torch.bool, device=mask.device).triu(1)
    if hidden.shape[1] != 1 or not torch.equal(hidden[:, 0], others | later):
        raise ValueError(
            "is given a mask that is not of causal documents: leave it out, or give their borders"
            " in PackedSeqParams"
        )
    return lengths_of_starts(starts)
