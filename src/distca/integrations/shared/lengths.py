"""The documents of a packed batch, read from what trainers provide: offsets or positions.

Legend: B rows of a batch, S tokens in a row. The rows of a batch are one packed sequence of B x S
tokens, and no document continues in the next row.
"""

import reprlib
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


def lengths_of_offsets(offsets: Tensor | Sequence[int], num_tokens: int) -> list[int]:
    """Returns lengths from cumulative lengths [documents + 1] (``cu_seqlens`` of varlen kernels).

    Repeated offsets, with which some collators pad, are skipped.
    """
    ends: Any = offsets.tolist() if isinstance(offsets, Tensor) else offsets  # waits for the device
    if not isinstance(ends, list | tuple) or not all(isinstance(end, int) for end in ends):
        raise ValueError(
            f"cumulative lengths {reprlib.repr(ends)} for {num_tokens} tokens: give integers in a"
            " tensor of one dimension or in a list"
        )
    lengths = [stop - start for start, stop in pairwise(ends)]
    if not ends or ends[0] != 0 or ends[-1] != num_tokens or min(lengths, default=0) < 0:
        raise ValueError(
            f"cumulative lengths {_shown(ends)} for {num_tokens} tokens: they must rise from 0 to"
            " the number of tokens"
        )
    return [length for length in lengths if length]


def starts_of_positions(positions: Tensor) -> Tensor:
    """Returns [B, S], true where a document starts, from [B, S] positions in documents.

    A document starts wherever a position is not the previous one plus one, which is the rule by
    which transformers masks packed documents.
    """
    starts = torch.ones_like(positions, dtype=torch.bool)
    starts[:, 1:] = positions.diff(dim=1) != 1
    return starts


def lengths_of_starts(starts: Tensor) -> list[int]:
    """Returns lengths from [B, S], true where a document starts. Every row starts one."""
    where = starts.clone()
    where[:, :1] = True
    first = where.flatten().nonzero().flatten()
    end = first.new_tensor([where.numel()])
    lengths: list[int] = torch.diff(first, append=end).tolist()
    return lengths


def _shown(numbers: Sequence[int]) -> str:
    return str([*numbers]) if len(numbers) <= 8 else f"[{numbers[0]}, ..., {numbers[-1]}]"
