"""Attention kernels behind one small interface."""

from distca.attention.backend import Attended, Backend, Gradients, Packed, Traits
from distca.attention.choice import backends, choose

__all__ = ["Attended", "Backend", "Gradients", "Packed", "Traits", "backends", "choose"]
