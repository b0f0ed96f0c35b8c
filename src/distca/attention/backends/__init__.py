"""Attention kernels behind one small interface."""

from distca.attention.backends.base import (
    Attended,
    Backend,
    Gradients,
    PackedCall,
    Saved,
    Traits,
)
from distca.attention.backends.choice import backends, choose

__all__ = [
    "Attended",
    "Backend",
    "Gradients",
    "PackedCall",
    "Saved",
    "Traits",
    "backends",
    "choose",
]
