"""A dataloader of torchtitan that is read ahead, so that batches are planned before they are due.

[Note: state] A checkpoint must hold the loader's state at the batch that is learnt from, not at the
one that was read ahead. So the state is taken after every batch read, and handed on with it.

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
from distca.integrations.shared.planned import Promise
from distca.integrations.shared.prefetch import Ahead
from distca.integrations.torchtitan.sharing import Sharing

Batch = tuple[dict[str, Any], Tensor]  # inputs and labels


class PlannedDataLoader(BaseDataLoader):  # type: ignore[misc]
    """The batches of ``loader``, on all ranks equally many: one without batches gets fillers."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]
        loader: BaseDataLoader.Config
        settings: dict[str, Any]

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        seq_len: int,
        local_batch_size: int,
        snapshot_every_n_steps: int | None = 1,
        **given: Any,
    ) -> None:
        self._sharing = Sharing.of(config.settings, known=True)
        self._sharing.tell_degree(dp_world_size, dp_rank)
        self._loader = config.loader.build(
            dp_world_size=dp_world_size,
            dp_rank=dp_rank,
            seq_len=seq_len,
            local_batch_size=local_batch_size,
            snapshot_every_n_steps=snapshot_every_n_steps,
            **given,
        )
        self._size = local_batch_size, seq_len
        self._saves = snapshot_every_n_steps is not None  # torchtitan writes checkpoints
        self._states: deque[Any] = deque()  # after batches that were read and not yet handed on
        self._state: Any = None

    def __iter__(self) -> Iterator[Batch]:
        if self._sharing.local:
            yield from self._loader
            return
        ahead = Ahead(
            self._remembered(),
            self._sharing.attention,
            lengths_of=lengths_of,
            attach=self._expect,
            filler=self._filler,
        )
        for batch in ahead:
            if self._states:
                self._state = self._states.popleft()
            yield batch

    def state_dict(self) -> Any:
        """[Note: state]"""
        return self._loader.state_dict() if self._state is None else self._state

    def load_state_dict(self, state_dict: Any) -> None:
        self._loader.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        """Whatever else is asked of a loader."""
        if name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)

    def _remembered(self) -> Iterator[Batch]:
        for batch in self._loader:
            if self._saves:
                self._states.append(deepcopy(self._loader.state_dict()))
            yield batch

    def _expect(self, batch: Batch, promise: Promise) -> Batch:
        self._sharing.expect(promise)
        return batch

    def _filler(self, last: Batch | None) -> Batch:
        """The last batch again, but nobody learns from it."""
        if last is not None:
            inputs, labels = last
            return dict(inputs), torch.full_like(labels, IGNORE_INDEX)
        tokens = torch.zeros(self._size, dtype=torch.int64)
        positions = torch.arange(self._size[1]).expand(self._size)
        return {"input": tokens, "positions": positions}, torch.full_like(tokens, IGNORE_INDEX)


def lengths_of(batch: Batch) -> list[int]:
    """Of documents, by torchtitan's rule: one starts wherever a position is 0."""
    inputs, _ = batch
    positions = inputs.get("positions")
    if positions is None:
        raise ValueError(
            "the dataloader gives no positions, so that documents cannot be told apart: leave out"
            " the override of the dataloader"
        )
    return lengths_of_starts(positions == 0)
