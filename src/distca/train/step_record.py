"""The record of a step: what each rank has measured, and what follows from all of it."""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields

import torch
from torch import Tensor

from distca.model.config import ModelConfig
from distca.runtime.batches import Prefetched
from distca.train.flops import peak_flops, step_flops
from distca.train.metrics import Record

OF_EACH_RANK = ("attention_s", "exposed_s", "waited_s")  # recorded for each rank, to find late ones


@dataclass(frozen=True)
class Measured:
    """What one rank has measured in a step, or [ranks] what all of them have.

    plan_rank: its number in the plans of the step.
    attention_s, planned_s: seconds of attention on this rank, and how many were planned for it.
    serves: whether the plan lets this rank compute attention.
    exposed_s: seconds in which this rank waited for exchanges.
    waited_s: seconds in which this rank waited for its next batch.
    stop, leaves: whether this rank wants to end the run, or only to leave it, as a server can.
    admits: whether processes wait to join the run; known to the first rank.
    """

    plan_rank: int | Tensor
    loss: float | Tensor
    grad_norm: float | Tensor
    seconds: float | Tensor
    attention_s: float | Tensor
    planned_s: float | Tensor
    serves: bool | Tensor
    exposed_s: float | Tensor
    waited_s: float | Tensor
    memory_bytes: int | Tensor
    stop: bool | Tensor
    leaves: bool | Tensor
    admits: bool | Tensor

    def tensor(self) -> Tensor:
        return torch.tensor(astuple(self), dtype=torch.float64)

    @classmethod
    def of_ranks(cls, everyone: Tensor) -> dict[str, Tensor]:
        """Returns by name what was measured [ranks], from the tensors of all ranks."""
        return dict(zip((field.name for field in fields(cls)), everyone.T, strict=True))


def step_record(
    ranks: dict[str, Tensor], fetched: Prefetched, model: ModelConfig, device: torch.device
) -> Record:
    """Returns the figures of a step over all ranks, from what each has measured."""
    batch, plan = fetched.step.batch, fetched.step.plan
    busy = ranks["attention_s"]
    busy = busy[ranks["serves"] > 0]  # workers that leave all attention to servers do not count
    wall, peak = float(ranks["seconds"].max()), peak_flops(device)
    rate = step_flops(model, batch.lengths, batch.prefixes) / wall / len(ranks["loss"])
    return {
        "loss": float(ranks["loss"].sum()),
        "grad_norm": float(ranks["grad_norm"].max()),
        "seconds": wall,
        "tokens": batch.num_tokens,
        "tokens_per_s": batch.num_tokens / wall,
        "tflops_per_rank": rate / 1e12,
        "mfu": rate / peak if peak else None,
        "imbalance_before": plan.imbalance_before,
        "imbalance_planned": plan.imbalance,
        "speeds": plan.speed,
        "imbalance_measured": float(busy.max() / busy.mean()) if busy.sum() else 1.0,
        "bytes": plan.num_bytes,
        "exposed_s": float(ranks["exposed_s"].max()),
        "plan_s": fetched.plan_s,
        "planning_waited_s": float(ranks["waited_s"].max()),
        **({"tokens_saved": batch.num_saved} if batch.num_saved else {}),
        "memory_bytes": int(ranks["memory_bytes"].max()),
        "stopped": bool(ranks["stop"].max()),
        "ranks": {name: _microseconds(ranks[name]) for name in OF_EACH_RANK},
    }


def _microseconds(seconds: Tensor) -> list[float]:
    """Returns seconds to the microsecond, which keeps the lines of many ranks short."""
    return [round(one, 6) for one in seconds.tolist()]
