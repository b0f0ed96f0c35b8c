"""Attention kernels behind one small interface."""

from distca.attention.backends.base import Attended, Backend, Gradients, Packed, Traits
from distca.attention.backends.choice import backends, choose

__all__ = ["Attended", "Backend", "Gradients", "Packed", "Traits", "backends", "choose"]
