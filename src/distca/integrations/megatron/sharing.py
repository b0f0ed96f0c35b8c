"""Which ranks share the attention of Megatron-Core's layers, and their plans for a micro-batch."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from distca.integrations.megatron.batches import (
    Ticket,
    head_and_tail,
    keep_ticket,
    lengths_of,
    lengths_of_mask,
    ticket_of,
)
from distca.integrations.shared.background import at_once
from distca.integrations.shared.planned import PlannedAttention, PlannedBatch, Promise
from distca.planning.placement import Entry


class Sharing:
    """Data-parallel peers of a rank: one for all layers of a stage.

    group: all ranks that have the same weights as this one, with those of context parallelism.
    cp_group: those of them that have the other parts of this rank's documents.
    options: of ``PlannedAttention``.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        cp_group: dist.ProcessGroup,
        options: Mapping[str, Any],
    ) -> None:
        self.planned = PlannedAttention(group, **options)
        self.attend = self.planned.attend
        self._cp = dist.get_rank(cp_group), dist.get_world_size(cp_group)
        self._home = min(dist.get_process_group_ranks(cp_group))
        self._alone = lru_cache(16)(self.planned.alone)  # rows are alike in every micro-batch
        self._gathered: dict[tuple[int, ...], PlannedBatch] = {}
        self._in_masks: MutableMapping[Tensor, Any] = WeakTensorKeyDictionary()

    def __deepcopy__(self, memo: Any) -> Sharing:
        """A copied model is of the same ranks."""
        return self

    @property
    def cp_size(self) -> int:
        return self._cp[1]

    def packed(self, layer: Any, packed: PackedSeqParams, rows: Sequence[int]) -> PlannedBatch:
        """Of a micro-batch with ``PackedSeqParams``, whose tensors have ``rows`` on this rank."""
        ticket, shared = ticket_of(packed), layer.training or self.cp_size > 1
        if ticket is None or (shared and ticket.local):
            ticket = self.issue(packed, rows, local=not shared, where=layer.where)
        if not ticket.local and not ticket.visit(layer):
            self.planned.gather(  # for all ranks to raise
                [],
                complaint=f"{layer.where} is given the PackedSeqParams of an earlier forward pass:"
                " make another for each (dataclasses.replace(packed_seq_params) will do)",
            )
        batch = self.planned.wait(ticket.promise)
        assert batch is not None, "this rank has one"
        _check_rows(batch.lengths, rows, layer.where)  # not looked at before, where planned ahead
        return batch

    def issue(
        self,
        packed: PackedSeqParams,
        rows: Sequence[int] | None = None,
        *,
        local: bool = False,
        where: str = "plan_ahead",
    ) -> Ticket:
        """Plans in the background; where one rank's documents cannot be, all ranks will raise."""
        documents, complaint = list[Entry](), ""
        try:
            documents = self._documents(packed, rows)
        except ValueError as error:
            complaint = f"{where}: {error}"
        if local:
            if complaint:
                raise ValueError(complaint)
            promise: Promise = at_once(lambda: self.planned.alone(documents))
        else:
            promise = self.planned.submit(documents, complaint=complaint)
        return keep_ticket(packed, Ticket(promise, local))

    def rows(self, layer: Any, rows: Sequence[int], mask: Tensor | None) -> PlannedBatch:
        """Of a micro-batch without; equal rows on all ranks, by Megatron's rules."""
        if self.cp_size == 1:
            return self._alone(tuple(rows if mask is None else self._seen(layer, mask, len(rows))))
        if mask is not None or layer.config.variable_seq_lengths:
            what = "variable_seq_lengths" if mask is None else "a mask"
            raise ValueError(
                f"{layer.where} is given {what} under context parallelism: give PackedSeqParams"
                " instead (or none, for rows of one document each)"
            )
        if tuple(rows) not in self._gathered:
            lengths = [length * self.cp_size for length in rows]
            shards = head_and_tail(lengths, *self._cp, self._home)
            self._gathered[tuple(rows)] = self.planned.gather(shards)
        return self._gathered[tuple(rows)]

    def _documents(self, packed: PackedSeqParams, rows: Sequence[int] | None) -> list[Entry]:
        if packed.local_cp_size is not None or packed.cp_group is not None:
            raise ValueError("context-parallel groups that change by micro-batch are not done")
        lengths = lengths_of(packed)
        if lengths is None:
            if packed.qkv_format == "thd" or rows is None:
                raise ValueError("PackedSeqParams without cu_seqlens_q: they say the documents")
            lengths = [length * self.cp_size for length in rows]
        elif packed.qkv_format != "thd" and self.cp_size > 1:
            raise ValueError(
                f"cu_seqlens_q with qkv_format {packed.qkv_format} under context parallelism, which"
                " cuts rows and not documents: pack them (thd)"
            )
        if rows is not None:
            _check_rows(lengths, [length * self.cp_size for length in rows], "PackedSeqParams")
        return head_and_tail(lengths, *self._cp, self._home)

    def _seen(self, layer: Any, mask: Tensor, num_rows: int) -> list[int]:
        """The documents in a mask, looked at once while it does not change."""
        known = self._in_masks.get(mask)
        if known is None or known[0] != (mask._version, num_rows):
            try:
                lengths = lengths_of_mask(mask, num_rows)
            except ValueError as error:
                raise ValueError(f"{layer.where} {error}") from None
            known = self._in_masks[mask] = (mask._version, num_rows), lengths
        found: list[int] = known[1]
        return found


def _check_rows(lengths: Sequence[int], rows: Sequence[int], where: str) -> None:
    """Documents fill the rows of a tensor, and none goes on in the next."""
    if sum(lengths) != sum(rows):
        raise ValueError(
            f"{where}: documents of {sum(lengths)} tokens, but tensors of {sum(rows)}: they must be"
            " equal"
        )
    if not {*accumulate(rows)} <= {*accumulate(lengths)}:
        raise ValueError(
            f"{where}: a document goes on in the next row of {rows[0]} tokens: end it with its row"
        )
