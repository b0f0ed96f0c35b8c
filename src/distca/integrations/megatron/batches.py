"""Micro-batches of Megatron-Core: their documents, and the plans that they carry.

[Note: plans of a micro-batch] Plans are made once per micro-batch, and every layer must find them,
also when it is recomputed in the backward pass while other micro-batches are in flight. The one
object that Megatron passes to every layer and keeps for recomputation is the micro-batch's
``PackedSeqParams``. So the plans are an attribute of it, and live as long as it does.

Legend: B rows, S tokens in a row on this rank, C ranks of a context-parallel group.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from distca.integrations.shared.lengths import lengths_of_offsets, lengths_of_starts
from distca.integrations.shared.planned import BatchFuture
from distca.planning.entries import Entry

_ATTRIBUTE = "distca_micro_batch"  # of PackedSeqParams
_DOCUMENTS_PER_GROUP = 1 << 32  # document numbers of each context-parallel group


@dataclass
class PlannedMicroBatch:
    """The plans of a micro-batch, and the layers that have used them so far."""

    future: BatchFuture
    local: bool  # it has the documents of this rank only
    grad_modes: dict[Any, bool] = field(default_factory=dict)  # by layer, at its latest call

    def visit(self, layer: Any) -> bool:
        """Records a call of the layer, and tells whether it is its first or its recomputation.

        A layer that is recomputed ran without gradients first, and runs with them now.
        """
        grad_enabled, first = torch.is_grad_enabled(), layer not in self.grad_modes
        expected = first or (grad_enabled and not self.grad_modes[layer])
        self.grad_modes[layer] = grad_enabled
        return expected


def planned_of(packed: PackedSeqParams) -> PlannedMicroBatch | None:
    planned: PlannedMicroBatch | None = vars(packed).get(_ATTRIBUTE)
    return planned


def attach(packed: PackedSeqParams, planned: PlannedMicroBatch) -> PlannedMicroBatch:
    setattr(packed, _ATTRIBUTE, planned)
    return planned


def lengths_of(packed: PackedSeqParams) -> list[int] | None:
    """Returns lengths of documents with the padding after each; None if there are no offsets.

    Padding counts as the end of its document: no other token attends to it.
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
        raise ValueError("cu_seqlens_q and cu_seqlens_kv differ: give the same for both")
    return lengths_of_offsets(q, int(q[-1]))


def head_and_tail(
    lengths: Sequence[int], cp_rank: int, cp_size: int, first_rank: int
) -> list[Entry]:
    """Returns the shards of documents that a context-parallel rank holds.

    Megatron cuts each document into 2C chunks and gives chunks i and 2C-1-i to rank i.

    first_rank: the first global rank of the group, which tells its documents from those of others.
    """
    if cp_size == 1:
        return list(lengths)
    shards: list[Entry] = []
    for number, length in enumerate(lengths):
        size, rest = divmod(length, 2 * cp_size)
        if rest:
            raise ValueError(
                f"document {number} has {length} tokens, which cannot be split over {cp_size}"
                f" context-parallel ranks: pad it to a multiple of {2 * cp_size}"
                " (cu_seqlens_q_padded)"
            )
        for chunk in (cp_rank, 2 * cp_size - 1 - cp_rank):
            start = chunk * size
            document = first_rank * _DOCUMENTS_PER_GROUP + number
            shards.append({"document": document, "start": start, "stop": start + size})
    return shards


def lengths_of_mask(mask: Tensor, num_rows: int) -> list[int]:
    """Returns lengths from a mask [B or 1, 1, S, S] of Megatron's datasets, true where it masks.

    A document starts where a token does not attend to the previous one. Raises unless the mask is
    that of causal documents.
    """
    masked = mask.expand(num_rows, -1, -1, -1)
    size = masked.shape[-1]
    starts = torch.zeros(num_rows, size, dtype=torch.bool, device=mask.device)
    starts[:, 1:] = masked[:, 0].diagonal(-1, 1, 2)
    document = starts.cumsum(1)
    others = document[:, :, None] != document[:, None, :]
    later = torch.ones(size, size, dtype=torch.bool, device=mask.device).triu(1)
    if masked.shape[1] != 1 or not torch.equal(masked[:, 0], others | later):
        raise ValueError(
            "is given a mask that is not of causal documents: leave it out, or give the offsets of"
            " documents in PackedSeqParams"
        )
    return lengths_of_starts(starts)
