"""Registers ``attn_implementation="distca"`` when verl imports this module in its workers.

    actor_rollout_ref.model.external_lib=distca.integrations.verl
    +actor_rollout_ref.model.override_config.attn_implementation=distca

For other options, name a module of your own that calls ``register_for_verl`` with them.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from transformers import AttentionInterface
from verl.utils.ulysses import get_ulysses_sequence_parallel_world_size

from distca.integrations.transformers import Registered, register


def register_for_verl(name: str = "distca", **options: Any) -> Registered:
    """Does what ``register`` does, and refuses Ulysses, which gives ranks parts of documents.

    options: those of ``register``.
    """
    registered = register(name, **options)

    @wraps(registered.attend)
    def attend(*args: Any, **given: Any) -> Any:
        if (size := get_ulysses_sequence_parallel_world_size()) > 1:
            raise ValueError(
                f"ulysses_sequence_parallel_size = {size} with attn_implementation={name!r}, which"
                " divides long documents over ranks itself: set it to 1"
            )
        return registered.attend(*args, **given)

    AttentionInterface.register(name, attend)
    return registered


registered = register_for_verl()
