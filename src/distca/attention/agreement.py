"""The handshake of all ranks before a plan's first exchange.

A mismatch inside a collective deadlocks, aborts the process or mixes up numbers. A handshake that
is compared on the host raises the same error on every rank instead. It costs one small gather per
plan, not per layer.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, Protocol, TypeVar

from distca.dispatch.transports.base import Transport

_ADVICE = {
    "plan": "make it from the same lengths and options on every rank",
    "grad_mode": "enter torch.no_grad() on all ranks or on none",
}


class DisagreementError(ValueError):
    """Raised on all ranks if they do not have the same plan and the same kind of tensors."""


@dataclass(frozen=True)
class Handshake:
    """What one rank compares with the others; None for what a server does not know."""

    plan: str  # fingerprint
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    dtype: str | None = None
    device: str | None = None
    scale: float | None = None
    grad_mode: bool | None = None
    wants_gradient: bool = False  # of q, k or v; ranks may differ
    error: str = ""  # why this rank cannot take part


class Agreed(NamedTuple):
    common: Handshake  # the values that ranks brought; wants_gradient if any rank does
    some_serve: bool  # whether some ranks brought no tensors


class _WithError(Protocol):
    @property
    def error(self) -> str: ...


Record = TypeVar("Record", bound=_WithError)


def gather_or_raise(transport: Transport, mine: Record) -> list[Record]:
    """Returns the records of all ranks; if one of them has an error, all ranks raise it."""
    records = transport.all_gather_object(mine)
    if mine.error:
        raise DisagreementError(mine.error)
    for rank, record in enumerate(records):
        if record.error:
            raise DisagreementError(f"rank {rank} cannot take part: {record.error}")
    return records


def agree(transport: Transport, mine: Handshake) -> Agreed:
    """Compares the handshakes of all ranks; raises on every rank if one differs or has an error."""
    handshakes = gather_or_raise(transport, mine)
    common: dict[str, Any] = {}
    for name in (field.name for field in fields(mine)):
        if name in ("wants_gradient", "error"):
            continue
        values = ((rank, getattr(one, name)) for rank, one in enumerate(handshakes))
        known = {rank: value for rank, value in values if value is not None}
        if len(set(known.values())) > 1:
            raise DisagreementError(_difference(name, known))
        common[name] = next(iter(known.values()), None)
    common["wants_gradient"] = any(one.wants_gradient for one in handshakes)
    return Agreed(replace(mine, **common), any(one.heads is None for one in handshakes))


def _difference(field: str, values: dict[int, Hashable]) -> str:
    by_value: dict[Hashable, list[int]] = {}
    for rank, value in values.items():
        by_value.setdefault(value, []).append(rank)
    parts = [f"{str(value)[:12]} on {_ranks(ranks)}" for value, ranks in by_value.items()]
    advice = _ADVICE.get(field, "it must be the same everywhere")
    name = field.replace("_", " ")
    return f"the ranks disagree on the {name}: {' but '.join(parts)}; {advice}"


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
