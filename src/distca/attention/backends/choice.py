"""The choice of a backend: by name, or the first one that supports what is asked."""

from distca.attention.backends.base import Backend, Traits
from distca.attention.backends.blocks import Blocks
from distca.attention.backends.fa4 import FlashAttention4
from distca.attention.backends.flash import Flash
from distca.attention.backends.reference import Reference
from distca.attention.backends.sdpa import Sdpa


def backends() -> tuple[Backend, ...]:
    """Returns all backends, in the order in which "auto" tries them."""
    return FlashAttention4(), Flash(), Sdpa(), Blocks(), Reference()


def choose(name: str, traits: Traits) -> Backend:
    """Returns the backend of this name or, with "auto", the first that supports the traits."""
    known = {backend.name: backend for backend in backends()}
    if name != "auto":
        if name not in known:
            raise ValueError(f"attention backend {name!r} is unknown: use auto, {', '.join(known)}")
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
