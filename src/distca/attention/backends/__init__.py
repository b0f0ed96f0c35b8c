"""Attention kernels behind one small interface."""

from distca.attention.backends.base import Traits
from distca.attention.backends.choice import choose

__all__ = ["Traits", "choose"]
