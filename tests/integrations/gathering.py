"""What ranks run in the tests of what integrations share."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F

from distca.integrations.planned import PlannedAttention


def gathered(group: dist.ProcessGroup, lengths: list[list[int]]) -> tuple[tuple[int, ...], ...]:
    return PlannedAttention(cost="pairs").gather(lengths[dist.get_rank(group)]).ranks


def in_parts(group: dist.ProcessGroup) -> float:
    """Three ranks share their attention, and the fourth is alone; the error of this rank."""
    rank = dist.get_rank(group)
    parts = [dist.new_group([0, 1, 2]), dist.new_group([3])]
    attention = PlannedAttention(parts[rank // 3], cost="pairs")
    lengths = [[300], [20, 7], [], [64]][rank]
    batch = attention.gather(lengths)
    assert batch.lengths == tuple(lengths)
    assert batch.alone == (rank == 3)
    assert len(batch.ranks) == (1 if batch.alone else 3)
    draw = torch.Generator().manual_seed(rank)
    q, k, v = torch.randn(3, sum(lengths), 4, 8, generator=draw)
    out = attention.attend(q, k, v, batch)
    right = [
        F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in own), is_causal=True)
        for own in zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
    ]
    parts_of = zip(out.split(lengths), right, strict=True)
    return max([float((a.transpose(0, 1) - b).norm() / b.norm()) for a, b in parts_of], default=0.0)


def complained(group: dist.ProcessGroup) -> str:
    try:
        PlannedAttention().gather([3], "no ink" if dist.get_rank(group) else "")
    except ValueError as error:
        return str(error)
    return ""
