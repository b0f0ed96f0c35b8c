"""The attention of one torchtitan model, which its layers and its dataloader share.

torchtitan makes one ``VarlenMetadata`` for every micro-batch and passes it to every layer, also to
one that is recomputed in the backward pass. So the plans of a micro-batch are kept under its
offsets: the first layer makes them, the others find them, and they are freed with the micro-batch.

[Note: names] torchtitan builds every layer, and the dataloader, from a config of its own. Configs
are plain data that torchtitan writes as JSON, so they cannot hold the object that they share. They
hold its name, and this module keeps the objects by name, weakly: an object lives as long as a layer
or a dataloader that uses it. ``adopt`` gives every config a new name; overrides that are named on a
command line use the default name, since a process there has one model.
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
from distca.integrations.shared.planned import BatchFuture, PlannedAttention
from distca.integrations.shared.planned_batch import PlannedBatch

DEFAULT_NAME = "distca"

_BY_NAME: WeakValueDictionary[str, ModelAttention] = WeakValueDictionary()  # [Note: names]


class ModelAttention:
    """Attention that the layers of a model share; over all ranks unless a mesh tells otherwise.

    options: options of ``PlannedAttention``.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = dict(options)
        self._num_layers = 0
        self._started = False  # a layer has computed attention, so that the model is complete
        self._copied = False
        self._ranks_known = False
        self.is_local = False  # no other rank has other documents of the same layers
        self.attention = self._make(None)
        self._queue: deque[BatchFuture] = deque()  # plans of batches that were read in advance
        self._batches: Any = WeakTensorKeyDictionary()  # offsets -> {grad enabled: PlannedBatch}

    @classmethod
    def for_layer(cls, name: str, options: Mapping[str, Any]) -> ModelAttention:
        """Returns the attention of the model that is being built with this name."""
        known = _BY_NAME.get(name)
        if known is None or known._started:
            known = _BY_NAME[name] = cls(options)
        if known._options != options:
            raise ValueError(
                f"layers of the attention {name!r} have options {known._options} and"
                f" {dict(options)}: give all layers of a model the same options, and every model"
                " another name"
            )
        return known

    @classmethod
    def named(cls, name: str) -> ModelAttention:
        """Returns the attention of the model that was built with this name."""
        if name not in _BY_NAME:
            raise ValueError(
                f"no layer has the attention {name!r}: add the override inner_attention with this"
                " name, or leave out the overrides of the dataloader and of the metrics"
            )
        return _BY_NAME[name]

    def __deepcopy__(self, _: Any) -> ModelAttention:
        """Returns itself: a pipeline copies the model for each of its stages."""
        self._copied = True
        return self

    def add_layer(self) -> int:
        """Returns the number of a new layer, from 0."""
        number, self._num_layers = self._num_layers, self._num_layers + 1
        return number

    def use_mesh(self, parallel_dims: Any) -> None:
        """Shares attention between the ranks with other documents of the same layers and heads.

        The layers of every rank call it when torchtitan parallelizes the model.
        """
        if parallel_dims.cp > 1:
            raise ValueError(
                f"context parallelism of degree {parallel_dims.cp} splits rows, which distca does"
                " not support: set parallelism.context_parallel_degree to 1, and distca splits long"
                " documents itself"
            )
        if self._ranks_known:  # from another layer
            return
        num_ranks = parallel_dims.dp_replicate * parallel_dims.dp_shard
        part = 1 < num_ranks < parallel_dims.world_size
        self._use(parallel_dims.get_mesh("batch").get_group() if part else None, num_ranks)

    def use_degree(self, num_ranks: int, rank: int) -> None:
        """Shares attention between ``num_ranks`` ranks, unless a layer has been given the mesh.

        A dataloader calls it, on all ranks at the same point. With tensor parallelism the layers
        are always given the mesh. So the world has at most pipeline stages here, which are
        consecutive ranks.
        """
        if self._ranks_known or not dist.is_initialized():
            return
        group = None
        if 1 < num_ranks < dist.get_world_size():
            group, _ = dist.new_subgroups(num_ranks)  # type: ignore[no-untyped-call]
            assert dist.get_rank(group) == rank, "the pipeline is torchtitan's outermost axis"
        self._use(group, num_ranks)

    def enqueue(self, future: BatchFuture) -> None:
        """Adds the plans of a batch that was read in advance; batches are used in this order."""
        self._queue.append(future)

    def batch(self, offsets: Tensor, others: Tensor, num_tokens: int, where: str) -> PlannedBatch:
        """Returns the batch of a layer's micro-batch.

        offsets, others: cumulative lengths of queries and of keys, the same tensor in every layer.
        where: the layer, for error messages.
        """
        grad_enabled = torch.is_grad_enabled()
        known: dict[bool, PlannedBatch] = self._batches.setdefault(offsets, {})
        if grad_enabled not in known:
            self._started = True
            lengths, error = list[int](), ""
            try:
                if others is not offsets and not torch.equal(others, offsets):
                    raise ValueError("is given other documents for its keys than for its queries")
                lengths = lengths_of_offsets(offsets, num_tokens)
            except ValueError as raised:
                error = f"{where} {raised}"
            if grad_enabled and not self.is_local:
                known[grad_enabled] = self._shared(lengths, error, where)
            elif error:
                raise ValueError(error)
            else:
                known[grad_enabled] = self.attention.local(lengths)
        return known[grad_enabled]

    def _shared(self, lengths: list[int], error: str, where: str) -> PlannedBatch:
        if self._copied and not self._ranks_known and dist.is_initialized():
            raise ValueError(
                f"{where} is in a pipeline and does not know which ranks have the same stage: add"
                " distca's override of the dataloader too"
            )
        if not self._queue:
            return self.attention.gather(lengths, error)
        batch = self.attention.wait(self._queue.popleft())
        assert batch is not None, "this rank is not done"
        if error or batch.lengths != tuple(lengths):
            raise ValueError(
                error
                or f"{where} is given {len(lengths)} documents, but the next batch that was read"
                f" has {len(batch.lengths)} others: train on batches in the order of the"
                " dataloader, or leave out the override of the dataloader"
            )
        return batch

    def _use(self, group: dist.ProcessGroup | None, num_ranks: int) -> None:
        self.is_local, self._ranks_known = num_ranks == 1, True
        if group is not None:
            self.attention = self._make(group)

    def _make(self, group: dist.ProcessGroup | None) -> PlannedAttention:
        deterministic = self._options.get("deterministic", False)
        deterministic |= torch.are_deterministic_algorithms_enabled()
        return PlannedAttention(group, **self._options | {"deterministic": deterministic})
