"""The attention that the ranks of one data-parallel group share, for all layers of a stage."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from distca.dispatch.background import run_now
from distca.integrations.megatron.batches import (
    PlannedMicroBatch,
    attach,
    head_and_tail,
    lengths_of,
    lengths_of_mask,
    planned_of,
)
from distca.integrations.shared.planned import BatchFuture, PlannedAttention
from distca.integrations.shared.planned_batch import PlannedBatch
from distca.planning.entries import Entry


class GroupAttention:
    """Attention of a data-parallel group, one object for all layers of a pipeline stage.

    group: the ranks with the same weights as this one, including those of context parallelism.
    cp_group: the ranks among them that hold the other parts of this rank's documents.
    options: options of ``PlannedAttention``.
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
        self._cp_first = min(dist.get_process_group_ranks(cp_group))
        self._local = lru_cache(16)(self.planned.local)  # most micro-batches have the same rows
        self._gathered: dict[tuple[int, ...], PlannedBatch] = {}
        self._mask_lengths: MutableMapping[Tensor, Any] = WeakTensorKeyDictionary()

    def __deepcopy__(self, memo: Any) -> GroupAttention:
        """Returns itself: a copied model belongs to the same ranks."""
        return self

    @property
    def cp_size(self) -> int:
        return self._cp[1]

    def packed(self, layer: Any, packed: PackedSeqParams, rows: Sequence[int]) -> PlannedBatch:
        """Returns the batch of a micro-batch with ``PackedSeqParams``.

        rows: the tokens in each row of the layer's tensors on this rank.
        """
        planned, shared = planned_of(packed), layer.training or self.cp_size > 1
        if planned is None or (shared and planned.local):
            planned = self.submit(packed, rows, local=not shared, where=layer.where)
        if not planned.local and not planned.visit(layer):
            self.planned.gather(  # so that all ranks raise
                [],
                error=f"{layer.where} is given the PackedSeqParams of an earlier forward pass:"
                " make a new object for each (dataclasses.replace(packed_seq_params) is enough)",
            )
        batch = self.planned.wait(planned.future)
        assert batch is not None, "this rank is not done"
        _check_rows(batch.lengths, rows, layer.where)  # plan_ahead did not know the rows
        return batch

    def submit(
        self,
        packed: PackedSeqParams,
        rows: Sequence[int] | None = None,
        *,
        local: bool = False,
        where: str = "plan_ahead",
    ) -> PlannedMicroBatch:
        """Plans a micro-batch in the background; an error in one rank's documents is raised on all.

        rows: the tokens in each row of this rank's tensors, if that is known.
        """
        documents, error = list[Entry](), ""
        try:
            documents = self._documents(packed, rows)
        except ValueError as raised:
            error = f"{where}: {raised}"
        if local:
            if error:
                raise ValueError(error)
            future: BatchFuture = run_now(lambda: self.planned.local(documents))
        else:
            future = self.planned.submit(documents, error=error)
        return attach(packed, PlannedMicroBatch(future, local))

    def rows(self, layer: Any, rows: Sequence[int], mask: Tensor | None) -> PlannedBatch:
        """Returns the batch of a micro-batch without ``PackedSeqParams``.

        Megatron then requires the same rows on all ranks.
        """
        if self.cp_size == 1:
            lengths = rows if mask is None else self._lengths_of(layer, mask, len(rows))
            return self._local(tuple(lengths))
        if mask is not None or layer.config.variable_seq_lengths:
            what = "variable_seq_lengths" if mask is None else "a mask"
            raise ValueError(
                f"{layer.where} is given {what} under context parallelism: give PackedSeqParams"
                " instead (or none, for rows of one document each)"
            )
        if tuple(rows) not in self._gathered:
            lengths = [length * self.cp_size for length in rows]
            shards = head_and_tail(lengths, *self._cp, self._cp_first)
            self._gathered[tuple(rows)] = self.planned.gather(shards)
        return self._gathered[tuple(rows)]

    def _documents(self, packed: PackedSeqParams, rows: Sequence[int] | None) -> list[Entry]:
        if packed.local_cp_size is not None or packed.cp_group is not None:
            raise ValueError(
                "context-parallel groups that differ between micro-batches are not supported"
            )
        lengths = lengths_of(packed)
        if lengths is None:
            if packed.qkv_format == "thd" or rows is None:
                raise ValueError(
                    "PackedSeqParams without cu_seqlens_q: give the offsets of documents"
                )
            lengths = [length * self.cp_size for length in rows]
        elif packed.qkv_format != "thd" and self.cp_size > 1:
            raise ValueError(
                f"cu_seqlens_q with qkv_format {packed.qkv_format} under context parallelism, which"
                " then splits rows instead of documents: pack the documents (thd)"
            )
        if rows is not None:
            _check_rows(lengths, [length * self.cp_size for length in rows], "PackedSeqParams")
        return head_and_tail(lengths, *self._cp, self._cp_first)

    def _lengths_of(self, layer: Any, mask: Tensor, num_rows: int) -> list[int]:
        """Returns the lengths of documents in a mask, read once as long as it does not change."""
        version = mask._version, num_rows
        known = self._mask_lengths.get(mask)
        if known is None or known[0] != version:
            try:
                lengths = lengths_of_mask(mask, num_rows)
            except ValueError as error:
                raise ValueError(f"{layer.where} {error}") from None
            known = self._mask_lengths[mask] = version, lengths
        found: list[int] = known[1]
        return found


def _check_rows(lengths: Sequence[int], rows: Sequence[int], where: str) -> None:
    """Raises unless the documents fill the rows of a tensor and each ends in its own row."""
    if sum(lengths) != sum(rows):
        raise ValueError(
            f"{where}: documents of {sum(lengths)} tokens, but tensors of {sum(rows)}: both must be"
            " equal"
        )
    if not {*accumulate(rows)} <= {*accumulate(lengths)}:
        raise ValueError(
            f"{where}: a document continues in the next row of {rows[0]} tokens: end it in its row"
        )
