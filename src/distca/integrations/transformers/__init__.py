"""``attn_implementation="distca"`` for models of transformers."""

from distca.integrations.transformers.attention import Registered, register
from distca.integrations.transformers.batches import tell_two_way
from distca.integrations.transformers.leaks import Leak, find_leaks
from distca.integrations.transformers.rollouts import batch_places, collate_shared

__all__ = [
    "Leak",
    "Registered",
    "batch_places",
    "collate_shared",
    "find_leaks",
    "register",
    "tell_two_way",
]
