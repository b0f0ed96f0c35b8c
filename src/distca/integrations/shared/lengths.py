"""Which documents a packed batch holds, as trainers say it: offsets, or positions that restart.

Legend: B rows of a batch, S tokens in a row. Rows follow each other, so that a batch of B rows is
one packed sequence of B x S tokens, and no document goes on in the next row.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


def lengths_of_offsets(offsets: Tensor, num_tokens: int) -> list[int]:
    """From cumulative lengths [documents + 1], as varlen kernels take them (``cu_seqlens``).

    Repeated offsets, which some collators pad with, are no documents.
    """
    ends = offsets.tolist()  # waits for the device, where they are on one
    lengths = [stop - start for start, stop in pairwise(ends)]
    if not ends or ends[0] != 0 or ends[-1] != num_tokens or min(lengths, default=0) < 0:
        raise ValueError(
            f"cumulative lengths {_shown(ends)} for {num_tokens} tokens: they must rise from 0 to"
            " the number of tokens"
        )
    return [length for length in lengths if length]


def starts_of_positions(positions: Tensor) -> Tensor:
    """[B, S] positions in their documents -> [B, S], true where a document starts.

    It does wherever a position is not the one before plus one: the rule by which transformers masks
    packed documents.
    """
    starts = torch.ones_like(positions, dtype=torch.bool)
    starts[:, 1:] = positions.diff(dim=1) != 1
    return starts


def lengths_of_starts(starts: Tensor) -> list[int]:
    """[B, S], true where a document starts; the first token of a row does in any case."""
    where = starts.clone()
    where[:, :1] = True
    first = where.flatten().nonzero().flatten()
    end = first.new_tensor([where.numel()])
    lengths: list[int] = torch.diff(first, append=end).tolist()
    return lengths


def _shown(numbers: list[int]) -> str:
    return str(numbers) if len(numbers) <= 8 else f"[{numbers[0]}, ..., {numbers[-1]}]"
