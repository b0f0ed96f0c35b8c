"""The documents of a packed batch, read from what trainers provide: offsets or positions.

Legend: B rows of a batch, S tokens in a row. The rows of a batch are one packed sequence of B x S
tokens, and no document continues in the next row.
"""

from itertools import pairwise

import torch
from torch import Tensor


def lengths_of_offsets(offsets: Tensor, num_tokens: int) -> list[int]:
    """Returns lengths from cumulative lengths [documents + 1] (``cu_seqlens`` of varlen kernels).

    Repeated offsets, with which some collators pad, are skipped.
    """
    ends = offsets.tolist()  # synchronizes with the device, if they are on one
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


def _shown(numbers: list[int]) -> str:
    return str(numbers) if len(numbers) <= 8 else f"[{numbers[0]}, ..., {numbers[-1]}]"
