"""The handshakes of all ranks: each of them says what it is about to do, before it does it.

A mismatch inside a collective deadlocks, aborts the process or mixes up numbers. So every message
of an exchange is announced to all ranks over the host, and a difference raises the same error on
every rank. A rank announces a message before it gathers or computes its rows, so that the answer
arrives in the meantime.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Sequence
from dataclasses import astuple, dataclass, fields, replace
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from distca.dispatch.transports.base import Check, ExchangeError, Records, Transport

_ORDER = "run the same layers in the same order on every rank, and serve as many of them"
# A rank that serves has no tensors, and keeps what it was told at a plan's first use.
_ALIKE = (
    "on all ranks, and in all uses of a plan that some rank only serves: for other tensors, make a"
    " new plan object on every rank"
)
_ADVICE = {
    "direction": _ORDER,
    "message": f"{_ORDER}, by plan objects that are new on all ranks or on none",
    "attention": _ORDER,
    "plan": "make it from the same lengths and options on every rank",
    "backward_order": "run the backward passes of layers in the same order on every rank",
    "sinks": f"give sinks to the same layers {_ALIKE}",
    "latent_dim": f"give latents to the same layers {_ALIKE}",
    "grad_mode": "enter torch.no_grad() on all ranks or on none",
    **dict.fromkeys(
        ("heads", "kv_heads", "head_dim", "v_head_dim", "rope_dim", "dtype", "device"),
        f"it must be the same {_ALIKE}",
    ),
}


class DisagreementError(ValueError):
    """Raised on all ranks if they do not run the same plan with the same kind of tensors."""


@dataclass(frozen=True)
class Handshake:
    """What one rank compares with the others; None for what it does not know, as a server may."""

    direction: str | None = None  # "forward" or "backward"
    plan: str | None = None  # fingerprint
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    v_head_dim: int | None = None
    latent_dim: int | None = None  # 0: keys and values travel
    rope_dim: int | None = None
    dtype: str | None = None
    device: str | None = None
    scale: float | None = None
    softcap: float | None = None  # 0: none
    sinks: bool | None = None  # whether the layer has attention sinks
    grad_mode: bool | None = None
    attention: int | None = None  # which one of several on the same ranks, such as ping and pong
    backward_order: int = 0  # see ``attention.call_order``
    message: str = "first use"  # or "dispatch" or "combine"; "step" or "gather" outside of layers
    wants_gradient: bool = False  # of q, k or v; ranks may differ
    error: str = ""  # why this rank cannot take part

    def __str__(self) -> str:
        """Returns what the rank is about to do."""
        what = filter(None, (self.direction, self.message))
        plan = "" if self.plan is None else f" of plan {self.plan[:12]}"
        return f"the {' '.join(what)}{plan}"

    @cached_property
    def record(self) -> str:
        return json.dumps(astuple(self))


_GATHER = Handshake(message="gather")


class Agreed(NamedTuple):
    common: Handshake  # the values that ranks brought; wants_gradient if any rank does
    some_serve: bool  # whether some ranks brought no tensors


class _WithError(Protocol):
    @property
    def error(self) -> str: ...


Record = TypeVar("Record", bound=_WithError)


def gather_or_raise(transport: Transport, mine: Record) -> list[Record]:
    """Returns the records of all ranks; if one of them has an error, all ranks raise it."""
    check(transport.announce(_GATHER.record))
    records = transport.all_gather_object(mine)
    _raise_errors(mine.error, [record.error for record in records])
    return records


def agree(transport: Transport, mine: Handshake) -> Agreed:
    """Compares the handshakes of all ranks; raises on every rank if one differs or has an error."""
    if transport.num_ranks == 1:
        _raise_errors(mine.error, [])
        return Agreed(mine, some_serve=mine.heads is None)
    return _compare(mine, _collect(transport.announce(mine.record)))


def announce(transport: Transport, mine: Handshake, device: torch.device) -> Check | None:
    """Tells all ranks what this one is about to send.

    The result waits until they have told it too, and raises if one of them does something else. It
    is None where they compare that while the message is under way.
    """
    if transport.note(mine.record, device):
        return None
    return partial(check, transport.announce(mine.record))


def check(wait: Callable[[], Records]) -> None:
    """Waits for the records of all ranks, and raises if they differ."""
    records = _collect(wait)
    if any(record != records[0] for record in records):
        _compare(Handshake(), records)


def _collect(wait: Callable[[], Records]) -> list[str]:
    try:
        return [record for record in wait() if record is not None]
    except ExchangeError as error:
        if not error.records:
            raise
        records = [_decode(record) if record else None for record in error.records]
        doing: dict[str, list[int]] = {}
        for rank, one in enumerate(records):
            doing.setdefault("" if one is None else str(one), []).append(rank)
        missing = doing.pop("", [])
        waited = ", and ".join(f"{_ranks(ranks)} waited in {what}" for what, ranks in doing.items())
        who = f"{_ranks(missing)} did not come" if missing else "a rank was lost"
        raise ExchangeError(f"{who}, while {waited}: {error}") from error


def _decode(record: str) -> Handshake:
    return Handshake(*json.loads(record))


def _compare(mine: Handshake, records: Sequence[str]) -> Agreed:
    handshakes = [_decode(record) for record in records]
    _raise_errors(mine.error, [one.error for one in handshakes])
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


def _raise_errors(mine: str, errors: Sequence[str]) -> None:
    if mine:
        raise DisagreementError(mine)
    for rank, error in enumerate(errors):
        if error:
            raise DisagreementError(f"rank {rank} cannot take part: {error}")


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
