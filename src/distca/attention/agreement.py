"""All ranks agree on the terms before a plan's first exchange, or all say why not.

A mismatch inside a collective hangs, aborts the process or mixes up numbers; a note compared on
the host does none of these. It costs one small gather per plan, not per layer.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from distca.dispatch.transports.base import NOTE_BYTES, Transport

_WAY_OUT = {
    "plan": "make it from the same lengths and options on every rank",
    "grad_mode": "enter torch.no_grad() on all ranks or on none",
}


class DisagreementError(ValueError):
    """The ranks did not come with the same plan and the same kind of tensors."""


@dataclass(frozen=True)
class Terms:
    """What one rank comes with; None where it has nothing to say, since it only serves."""

    plan: str
    heads: int | None = None
    kv_heads: int | None = None
    head_size: int | None = None
    dtype: str | None = None
    device: str | None = None
    scale: float | None = None
    grad_mode: bool | None = None
    wants_gradient: bool = False  # of q, k or v; may differ, one is enough
    complaint: str = ""  # why this rank cannot take part

    def note(self) -> bytes:
        fields = asdict(self)
        spare = NOTE_BYTES - len(json.dumps(fields | {"complaint": ""}).encode())
        while len(json.dumps(fields["complaint"]).encode()) > spare:
            fields["complaint"] = fields["complaint"][:-20]
        return json.dumps(fields).encode()


@dataclass(frozen=True)
class Agreed:
    """The terms of all: what every rank said that said anything."""

    terms: dict[str, Any]
    wants_gradient: bool  # on any rank
    some_serve: bool


def agree(transport: Transport, mine: Terms) -> Agreed:
    """Raises on every rank if any of them has a complaint or other terms."""
    notes = [json.loads(note) for note in transport.gather(mine.note())]
    if mine.complaint:
        raise DisagreementError(mine.complaint)
    for rank, note in enumerate(notes):
        if note["complaint"]:
            raise DisagreementError(f"rank {rank} cannot take part: {note['complaint']}")
    common = {}
    for field in asdict(mine):
        if field in ("wants_gradient", "complaint"):
            continue
        said = {rank: note[field] for rank, note in enumerate(notes) if note[field] is not None}
        if len(set(said.values())) > 1:
            raise DisagreementError(_difference(field, said))
        common[field] = next(iter(said.values()), None)
    return Agreed(
        terms=common,
        wants_gradient=any(note["wants_gradient"] for note in notes),
        some_serve=any(note["heads"] is None for note in notes),
    )


def _difference(field: str, said: dict[int, Hashable]) -> str:
    by_value: dict[Hashable, list[int]] = {}
    for rank, value in said.items():
        by_value.setdefault(value, []).append(rank)
    parts = [f"{str(value)[:12]} on {_ranks(ranks)}" for value, ranks in by_value.items()]
    way_out = _WAY_OUT.get(field, "it must be the same everywhere")
    name = field.replace("_", " ")
    return f"the ranks disagree on the {name}: {' but '.join(parts)}; {way_out}"


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
