"""Functions that ranks run in the tests of the shared part of integrations."""

from __future__ import annotations

from threading import current_thread
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from integrations.counting import recorded_devices
from recorded import preparing_threads
from slow_rank import timed_attention

from distca.dispatch.tensors import TensorSpec
from distca.integrations.shared.planned import BatchFuture, PlannedAttention
from distca.integrations.shared.planned_batch import AttentionSpec, PlannedBatch
from distca.planning import plan
from distca.planning.masks import CAUSAL, Mask


def tensors(heads: int, kv_heads: int, size: int) -> TensorSpec:
    device = torch.device("cpu")
    return TensorSpec(heads, kv_heads, size, size, torch.float32, device)


def gathered(group: dist.ProcessGroup, lengths: list[list[int]]) -> tuple[tuple[int, ...], ...]:
    return PlannedAttention(cost="pairs").gather(lengths[dist.get_rank(group)]).ranks


def in_parts(group: dist.ProcessGroup) -> float:
    """Returns the error of this rank, where three ranks share attention and the fourth does not."""
    rank = dist.get_rank(group)
    parts = [dist.new_group([0, 1, 2]), dist.new_group([3])]
    attention = PlannedAttention(parts[rank // 3], cost="pairs")
    lengths = [[300], [20, 7], [], [64]][rank]
    batch = attention.gather(lengths)
    assert batch.lengths == tuple(lengths)
    assert batch.is_local == (rank == 3)
    assert len(batch.ranks) == (1 if batch.is_local else 3)
    return _error(attention, batch)


def devices_of(
    group: dist.ProcessGroup, ranks_per_node: int, options: dict[str, Any]
) -> list[dict[str, list[Any]]]:
    """Returns the devices of two plans: of a batch of all ranks, and of a local one."""
    spec = AttentionSpec(Mask(CAUSAL), tensors(4, 2, 8))
    with recorded_devices(ranks_per_node) as found:
        attention = PlannedAttention(cost="pairs", **options)
        attention.gather([8]).plan(spec)
        attention.local([8]).plan(spec)
    return found


def preparing(group: dist.ProcessGroup) -> list[dict[str, int]]:
    """How many layouts each thread makes for each of four batches; the last two are equal."""
    attention, rank = PlannedAttention(cost="pairs"), dist.get_rank(group)
    found = []
    for number in (0, 1, 2, 2):
        with preparing_threads() as counts:
            assert _error(attention, attention.gather([[300 + number], [20, 7]][rank])) < 1e-5
            found.append(dict(counts))
    return found


def counting_traffic(group: dist.ProcessGroup) -> list[set[str]]:
    """Which threads add up the bytes that plans send, for each of three batches."""
    attention, rank = PlannedAttention(cost="pairs"), dist.get_rank(group)
    found: list[set[str]] = []
    traffic = plan.traffic

    def recorded(*args: Any, **options: Any) -> Any:
        found[-1].add(current_thread().name)
        return traffic(*args, **options)

    with patch.object(plan, "traffic", recorded):
        for number in range(3):
            found.append(set())
            _error(attention, attention.gather([[300 + number], [20, 7]][rank]))
    return found


def at_home(group: dist.ProcessGroup) -> tuple[float, str]:
    """Returns the error of batches that are not shared, and the sentence of one that is refused.

    The ranks have different numbers of batches, so that none may wait for another.
    """
    attention, rank = PlannedAttention(policy="colocated", cost="pairs"), dist.get_rank(group)
    batches = [attention.gather([30 + number, 7]) for number in range(1 + rank)]
    assert all(batch.is_local for batch in batches)
    try:
        attention.gather([], f"rank {rank} cannot")
    except ValueError as error:
        return max(_error(attention, batch) for batch in batches), str(error)
    return 0.0, "nothing"


def on_another_device(group: dist.ProcessGroup) -> float:
    """Returns the error of this rank, if torch.set_default_device chose another device."""
    attention = PlannedAttention(cost="pairs")
    torch.set_default_device("meta")
    try:
        batch = attention.gather([[300], [20, 7]][dist.get_rank(group)])
        return max(_error(attention, batch, mask) for mask in ("causal", "window:30"))
    finally:
        torch.set_default_device(None)


def _error(attention: PlannedAttention, batch: PlannedBatch, mask: str = "causal") -> float:
    lengths, draw = list(batch.lengths), torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, sum(lengths), 4, 8, generator=draw, device="cpu").requires_grad_()
    out = attention.attend(q, k, v, batch, mask=mask)
    out.sum().backward()
    window = Mask.parse(mask).reach
    seen = [
        torch.ones(length, length, dtype=torch.bool, device="cpu").tril().triu(1 - window)
        for length in lengths
    ]
    right = [
        F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in own), attn_mask=keys)
        for *own, keys in zip(*(x.split(lengths) for x in (q, k, v)), seen, strict=True)
    ]
    parts_of = zip(out.split(lengths), right, strict=True)
    return max([float((a.transpose(0, 1) - b).norm() / b.norm()) for a, b in parts_of], default=0.0)


def failed(group: dist.ProcessGroup) -> str:
    try:
        PlannedAttention().gather([3], "no ink" if dist.get_rank(group) else "")
    except ValueError as error:
        return str(error)
    return ""


def failed_with(group: dist.ProcessGroup, options: dict[str, Any]) -> str:
    try:
        PlannedAttention(**options).gather([3])
    except ValueError as error:
        return str(error)
    return ""


def with_a_slow_rank(
    group: dist.ProcessGroup, batches: int, slow: tuple[int, int], learns: bool
) -> list[tuple[list[float], float]]:
    """Returns the speeds of each batch's plan, and how long this rank computed its attention.

    Rank 2 has 0.6 of its speed in the batches [start, stop). The next batch is always submitted
    before the current one is computed, as ``prefetch`` does.
    """
    rank = dist.get_rank(group)
    attention = PlannedAttention(cost="pairs", tile=16, min_shard=16, learn_speed=learns)
    draw, spec = torch.Generator().manual_seed(rank), AttentionSpec(Mask(CAUSAL), tensors(1, 1, 8))
    found = []

    def submit() -> BatchFuture:
        return attention.submit([int(torch.randint(300, 600, (), generator=draw))])

    with timed_attention(pair_s=2e-6) as timed:
        ahead = submit()
        for number in range(batches):
            batch, ahead = attention.wait(ahead), submit()
            assert batch is not None
            timed.speed = 0.6 if rank == 2 and slow[0] <= number < slow[1] else 1.0
            attention.take_seconds()
            q = torch.randn(batch.lengths[0], 1, 8, requires_grad=True)
            attention.attend(q, q, q, batch).sum().backward()
            speeds = batch.plan(spec).devices.speed.tolist()
            found.append((speeds, attention.take_seconds()["attention"]))
    attention.wait(ahead)
    return found
