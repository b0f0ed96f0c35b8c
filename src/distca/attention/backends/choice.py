"""Which backend computes: the one that was named, or the first that does not refuse."""

from __future__ import annotations

from distca.attention.backends.base import Backend, Traits
from distca.attention.backends.fa4 import FlashAttention4
from distca.attention.backends.flash import Flash
from distca.attention.backends.reference import Reference
from distca.attention.backends.sdpa import Sdpa


def backends() -> tuple[Backend, ...]:
    """All of them, in the order in which "auto" asks."""
    return FlashAttention4(), Flash(), Sdpa(), Reference()


def choose(name: str, traits: Traits) -> Backend:
    """The named backend, or with "auto" the first that does not refuse."""
    known = {backend.name: backend for backend in backends()}
    if name != "auto":
        if name not in known:
            raise ValueError(f"attention backend {name!r} is unknown: say auto, {', '.join(known)}")
        if refusal := known[name].refusal(traits):
            raise ValueError(f"attention backend {name} refuses: {refusal}")
        return known[name]
    refusals = []
    for backend in known.values():
        refusal = backend.refusal(traits)
        if refusal is None:
            return backend
        refusals.append(f"  {backend.name}: {refusal}")
    raise ValueError("no attention backend fits:\n" + "\n".join(refusals))
