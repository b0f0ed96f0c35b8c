"""What the attention layers of one torchtitan model have in common: their ranks and their batches.

torchtitan makes one ``VarlenMetadata`` of every micro-batch and hands it to every layer, also to
one that is run again in backward. So plans are kept by its offsets: found by the first layer, there
for all others, gone with the micro-batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from distca.integrations.shared.lengths import lengths_of_offsets
from distca.integrations.shared.planned import PlannedAttention, PlannedBatch, Promise

Settings = tuple[tuple[str, Any], ...]  # keywords of a PlannedAttention, in order

# Layers are built one by one, from configs that hold nothing but settings.
_LIVING: WeakValueDictionary[Settings, Sharing] = WeakValueDictionary()


class Sharing:
    """The attention of a model's layers, found by its settings while one of them lives."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._num_layers = 0
        self._batches: Any = WeakTensorKeyDictionary()  # offsets -> {learns: PlannedBatch}
        self._begin()

    def _begin(self) -> None:
        """As for a new model: all ranks, until told otherwise."""
        self._attention = self._new(None)
        self.local = False  # there is nobody to share with
        self._told = self._copied = False
        self._read: deque[Promise] = deque()  # of batches that were read and not yet learnt from

    @classmethod
    def of(cls, settings: Mapping[str, Any], *, known: bool = False) -> Sharing:
        """known: layers must have been built with these settings."""
        key = tuple(sorted(settings.items()))
        sharing = _LIVING.get(key)
        if sharing is None:
            if known:
                raise ValueError(
                    f"no layer attends by distca with {dict(settings)}: name the override"
                    " inner_attention with the same settings, or leave this one out"
                )
            sharing = _LIVING[key] = cls(key)
        return sharing

    def __deepcopy__(self, _: Any) -> Sharing:
        """Shared by copies too: a pipeline copies the model for each of its stages."""
        self._copied = True
        return self

    @property
    def attention(self) -> PlannedAttention:
        return self._attention

    def enrol(self) -> int:
        """The number of a new layer, from 0 on in every model."""
        if self._num_layers == 0:
            self._begin()
        number, self._num_layers = self._num_layers, self._num_layers + 1
        return number

    def tell(self, parallel_dims: Any) -> None:
        """The ranks: those that hold other documents of the same layers and heads.

        Called by the layers of every rank while torchtitan lays out its model.
        """
        if parallel_dims.cp > 1:
            raise ValueError(
                f"context parallel of degree {parallel_dims.cp} cuts rows that distca wants whole:"
                " set parallelism.context_parallel_degree to 1, and distca cuts what is long"
            )
        if self._told:  # by another layer
            return
        num_ranks = parallel_dims.dp_replicate * parallel_dims.dp_shard
        part = 1 < num_ranks < parallel_dims.world_size
        self._share(parallel_dims.get_mesh("batch").get_group() if part else None, num_ranks == 1)

    def tell_degree(self, num_ranks: int, rank: int) -> None:
        """The same from a dataloader, which knows how many ranks have batches of their own.

        Layers hear of tensor parallel in any case. Where they heard nothing there is at most a
        pipeline, whose stages are runs of ranks. Called by all ranks at the same point.
        """
        if self._told or not dist.is_initialized():
            return
        group = None
        if 1 < num_ranks < dist.get_world_size():
            group, _ = dist.new_subgroups(num_ranks)  # type: ignore[no-untyped-call]
            assert dist.get_rank(group) == rank, "torchtitan's mesh begins with its pipeline"
        self._share(group, num_ranks == 1)

    def expect(self, promise: Promise) -> None:
        """The plans of a batch that was read, which is learnt from after all that were before."""
        self._read.append(promise)

    def batch(self, offsets: Tensor, others: Tensor, num_tokens: int, where: str) -> PlannedBatch:
        """offsets, others: cumulative lengths of queries and keys, as every layer gets them."""
        learns = torch.is_grad_enabled()
        known: dict[bool, PlannedBatch] = self._batches.setdefault(offsets, {})
        if learns not in known:
            self._num_layers = 0  # a model that is built from now on is another
            lengths, complaint = list[int](), ""
            try:
                if others is not offsets and not torch.equal(others, offsets):
                    raise ValueError("is given other documents for its keys than for its queries")
                lengths = lengths_of_offsets(offsets, num_tokens)
            except ValueError as error:
                complaint = f"{where} {error}"
            known[learns] = self._found(lengths, complaint, learns, where)
        return known[learns]

    def _found(self, lengths: list[int], complaint: str, learns: bool, where: str) -> PlannedBatch:
        if not learns or self.local:
            if complaint:
                raise ValueError(complaint)
            return self._attention.alone(lengths)
        if self._copied and not self._told and dist.is_initialized():
            raise ValueError(
                f"{where} is in a pipeline and was not told which ranks have the same stage: name"
                " distca's override of the dataloader too"
            )
        if not self._read:
            return self._attention.gather(lengths, complaint)
        batch = self._attention.wait(self._read.popleft())
        assert batch is not None, "this rank has one"
        if complaint or batch.lengths != tuple(lengths):
            raise ValueError(
                complaint
                or f"{where} is given {len(lengths)} documents, but {len(batch.lengths)} others"
                " were read next: learn from batches in the order of the dataloader, or leave out"
                " the override of the dataloader"
            )
        return batch

    def _share(self, group: dist.ProcessGroup | None, local: bool) -> None:
        self.local, self._told = local, True
        if group is not None:
            self._attention = self._new(group)

    def _new(self, group: dist.ProcessGroup | None) -> PlannedAttention:
        settings = dict(self._settings)
        settings["deterministic"] |= torch.are_deterministic_algorithms_enabled()
        return PlannedAttention(group, **settings)
