"""``attn_implementation="distca"`` for models of transformers."""

from distca.integrations.transformers.attention import Registered, register
from distca.integrations.transformers.leaks import Leak, find_leaks

__all__ = ["Leak", "Registered", "find_leaks", "register"]
