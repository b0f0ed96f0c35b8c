"""Turns of several workers of pytest-xdist: some tests need the machine to themselves.

Locks of files do it, since workers are processes that know nothing of each other. They are lost
together with the process that holds them.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

GATE, TURN = Path(__file__), Path(__file__).parent  # any two that exist: nothing is written


@contextmanager
def turn(*, alone: bool) -> Iterator[None]:
    """Waits until no other worker runs a test that must run alone, or any test if this one must."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        yield
        return
    from fcntl import LOCK_EX, LOCK_SH, LOCK_UN, flock

    gate, turn = (os.open(path, os.O_RDONLY) for path in (GATE, TURN))
    try:
        flock(gate, LOCK_EX)  # who waits for its turn lets nobody else begin
        flock(turn, LOCK_EX if alone else LOCK_SH)
        flock(gate, LOCK_UN)
        yield
    finally:
        flock(turn, LOCK_UN)  # closing is not enough, where a test has forked processes
        os.close(turn)
        os.close(gate)
