"""Attention that takes a known time on each rank, and longer on a slow one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any
from unittest.mock import patch

from distca.attention.backends.base import Backend
from distca.attention.backends.packed import PackedCall


@dataclass
class Timed:
    """How attention is timed: seconds of each causal query-key pair, and the speed of this rank."""

    pair_s: float
    speed: float = 1.0


@contextmanager
def timed_attention(pair_s: float) -> Iterator[Timed]:
    """Makes each kernel call of this rank last as long as its pairs, however busy the machine is.

    The results are real. Ranks sleep, so many of them share a few cores.
    """
    timed = Timed(pair_s)

    def lasting(method: Any) -> Any:
        @wraps(method)
        def call(*args: Any) -> Any:
            start = time.perf_counter()
            result = method(*args)
            (packed,) = (each for each in args if isinstance(each, PackedCall))
            pairs = sum(n * m - n * (n - 1) // 2 for n, m in packed.lengths)
            left_s = pairs * timed.pair_s / timed.speed - (time.perf_counter() - start)
            time.sleep(max(left_s, 0.0))
            return result

        return call

    with (
        patch.object(Backend, "forward", lasting(Backend.forward)),
        patch.object(Backend, "backward", lasting(Backend.backward)),
    ):
        yield timed
