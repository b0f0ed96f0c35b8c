"""One micro-batch through the model, forward, with one half or with ping and pong.

    seam 0     part(ping) launch(ping)  part(pong) launch(pong)
    layer 0    compute(ping)  compute(pong)
    seam 1     wait(ping) part(ping) launch(ping)  wait(pong) part(pong) launch(pong)
    ...

Every exchange but the first and the last lies under the other half's compute: what ``launch(ping)``
sends travels under part(pong), what ``launch(pong)`` sends under compute(ping), and results come
home under compute(pong) and under the next part(ping). Backward is the same in reverse, since
autograd takes the newest node first.

A seam is called once for both halves, so its parameters are gathered once. ``part`` may be
checkpointed; ``wait`` and ``launch`` stand outside of it, or they would exchange twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from distca.attention.core import CoreAttention, serve_turns
from distca.attention.flight import Flight
from distca.model.llama import Arriving, Leaving, Llama, Part, Seam
from distca.model.loss import Loss
from distca.runtime.batches import Half
from distca.runtime.mesh import Seat


@dataclass(frozen=True, eq=False)
class Crossing:
    """What it takes to bring halves through the layers on this rank."""

    seat: Seat
    attentions: tuple[CoreAttention, ...]  # one for each half: their exchanges overlap
    recompute: bool = False  # checkpoint the parts of seams

    @classmethod
    def of(
        cls,
        seat: Seat,
        *,
        halves: int = 1,
        recompute: bool = False,
        backend: str = "auto",
        deterministic: bool = False,
    ) -> Crossing:
        attentions = (
            CoreAttention(
                seat.attention, control=seat.control, backend=backend, deterministic=deterministic
            )
            for _ in range(halves)
        )
        return cls(seat, tuple(attentions), recompute)

    def losses(self, model: Llama, halves: Sequence[Half]) -> list[Loss]:
        """Of each half; this rank's share of the tokens."""
        device = self.seat.device
        arriving = []
        for half in halves:
            rows = half.rows(self.seat.plan_rank)
            tokens, positions = (t.to(device, non_blocking=True) for t in rows[:2])
            labels = self.own(rows.labels).to(device, non_blocking=True)
            arriving.append(Arriving(tokens, positions, labels=labels))
        leaving = model(arriving, _Walk(self, halves))
        return [half.loss for half in leaving if half.loss is not None]

    def serve(self, halves: Sequence[Half], backward: int) -> None:
        """The same turns without a model; ``backward`` of the layers go the other way too."""
        layers = zip(*(half.plans for half in halves), strict=True)
        turns = [list(zip(self.attentions, plans, strict=False)) for plans in layers]
        serve_turns(turns, backward)

    def own(self, rows: Tensor) -> Tensor:
        """This rank's share of a worker's rows: tensor parallelism splits them at the loss."""
        mesh = self.seat.tp_mesh
        return rows if mesh is None else rows.chunk(mesh.size())[mesh.get_local_rank()]


class _Walk:
    """One pass: calls every seam once, with all halves, and attends in between."""

    def __init__(self, crossing: Crossing, halves: Sequence[Half]) -> None:
        self._crossing, self._halves = crossing, halves
        self._flights: list[Flight | None] = [None] * len(halves)

    def __call__(self, seams: Sequence[Seam], arriving: list[Arriving]) -> list[Leaving]:
        leaving: list[Leaving] = []
        for seam in seams:
            leaving = seam(arriving, partial(self._cross, seam.number))
            for flight in self._flights:
                if flight is not None:
                    flight.compute()
            arriving = [
                before._replace(x=after.x) for before, after in zip(arriving, leaving, strict=True)
            ]
        return leaving

    def _cross(self, layer: int, part: Part, number: int, arriving: Arriving) -> Leaving:
        """One half through one seam. What it returns holds q, k and v: FSDP waits for their
        gradients to gather the seam again."""
        flight, self._flights[number] = self._flights[number], None
        if flight is not None:
            arriving = arriving._replace(attended=flight.wait())
        leaving = self._run(part, arriving)
        if leaving.qkv is not None:
            plan = self._halves[number].plans[layer]
            attention = self._crossing.attentions[number]
            self._flights[number] = attention.launch(*leaving.qkv, plan)
        return leaving

    def _run(self, part: Part, arriving: Arriving) -> Leaving:
        if not self._crossing.recompute or not torch.is_grad_enabled():
            return part(arriving)
        leaving: Leaving = checkpoint(part, arriving, use_reentrant=False)
        return leaving
