"""Errors that all ranks raise together, so that none is left waiting for one that has ended."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from distca.runtime.launched import mark_repeated, sentence


@contextmanager
def together(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Raises a mistake (ValueError or OSError) inside the ``with`` block on all ranks of the group.

    It is that of the lowest rank that has one, and is marked on the others, so that a user reads it
    once (``launched.is_repeated``). All ranks enter the block.
    """
    mine: ValueError | None = None
    try:
        yield
    except ValueError as error:
        mine = error
    except OSError as error:
        mine = ValueError(sentence(error))
    for rank, first in enumerate(from_all_ranks(mine, group)):
        if first is not None:
            mark_repeated(first, rank != dist.get_rank(group))
            raise first


def from_all_ranks(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Returns the values of all ranks of the group, in order."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values
