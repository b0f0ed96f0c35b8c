"""A dataloader of torchtitan that reads one batch in advance, so that it is planned when needed.

[Note: state] A checkpoint must hold the loader's state at the batch that is trained on, not at the
one that was read in advance. So the state is taken after every batch that is read, and becomes the
state of this dataloader when that batch is yielded.

Legend: B rows, L tokens in a row.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import IGNORE_INDEX

from distca.integrations.shared.lengths import lengths_of_starts
from distca.integrations.shared.planned import BatchFuture
from distca.integrations.shared.prefetch import prefetch
from distca.integrations.torchtitan.model_attention import DEFAULT_NAME, ModelAttention

Batch = tuple[dict[str, Any], Tensor]  # inputs and labels


class PlannedDataLoader(BaseDataLoader):  # type: ignore[misc]
    """Yields the batches of ``loader``, equally many on all ranks: fillers follow the last one."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]
        """The dataloader to read from, and the name of the layers' attention."""

        loader: BaseDataLoader.Config
        name: str = DEFAULT_NAME

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, **given: Any) -> None:
        self._shared = ModelAttention.named(config.name)
        self._shared.use_degree(dp_world_size, dp_rank)
        self._loader = config.loader.build(dp_world_size=dp_world_size, dp_rank=dp_rank, **given)
        self._size = given["local_batch_size"], given["seq_len"]
        self._saves = given.get("snapshot_every_n_steps", 1) is not None  # in checkpoints
        self._states: deque[Any] = deque()  # after each batch that was read and not yet yielded
        self._state: Any = None

    def __iter__(self) -> Iterator[Batch]:
        if self._shared.is_local:
            yield from self._loader
            return
        for batch in prefetch(
            self._read(),
            self._shared.attention,
            documents_of=lengths_of,
            attach=self._enqueue,
            filler=self._filler,
        ):
            if self._states:
                self._state = self._states.popleft()
            yield batch

    def state_dict(self) -> Any:
        """Returns the loader's state at the batch that was yielded last. [Note: state]"""
        return self._loader.state_dict() if self._state is None else self._state

    def load_state_dict(self, state_dict: Any) -> None:
        self._loader.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # not set yet while this object is copied
            raise AttributeError(name)
        return getattr(self._loader, name)

    def _read(self) -> Iterator[Batch]:
        for batch in self._loader:
            if self._saves:
                self._states.append(deepcopy(self._loader.state_dict()))
            yield batch

    def _enqueue(self, batch: Batch, future: BatchFuture) -> Batch:
        self._shared.enqueue(future)
        return batch

    def _filler(self, last: Batch | None) -> Batch:
        """Returns the last batch with all labels ignored."""
        if last is not None:
            inputs, labels = last
            return dict(inputs), torch.full_like(labels, IGNORE_INDEX)
        tokens = torch.zeros(self._size, dtype=torch.int64)
        positions = torch.arange(self._size[1]).expand(self._size)
        return {"input": tokens, "positions": positions}, torch.full_like(tokens, IGNORE_INDEX)


def lengths_of(batch: Batch) -> list[int]:
    """Returns the lengths of documents by torchtitan's rule: one starts at each position 0."""
    inputs, _ = batch
    positions = inputs.get("positions")
    if positions is None:
        raise ValueError(
            "the dataloader gives no positions, so that documents cannot be told apart: leave out"
            " the override of the dataloader"
        )
    return lengths_of_starts(positions == 0)
