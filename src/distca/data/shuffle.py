"""Shuffling by a hash of (keys, index), which is the same on every platform and numpy version.

numpy's random streams may change between versions, but a run that is resumed after an upgrade must
still read each document once.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]

# splitmix64: a Weyl sequence with this step, each of whose terms is then scrambled.
_STEP = 0x9E3779B97F4A7C15
_SCRAMBLE = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))
_HELD_OUT = 0x68656C64  # a key that no epoch's order has


def hashes(indices: Ints, *keys: int) -> Hashes:
    """Returns a hash [n] of each index; other keys give other hashes."""
    base = np.zeros(1, np.uint64)  # an array, since numpy warns when a scalar overflows
    for key in keys:
        base = _scramble(base + np.array([key % 2**64], np.uint64) + np.uint64(_STEP))
    return _scramble(base + indices.astype(np.uint64) * np.uint64(_STEP))


def shuffled(indices: Ints, *keys: int) -> Ints:
    """Returns ``indices`` in an order that depends on the keys."""
    return indices[np.argsort(hashes(indices, *keys), kind="stable")]


def choose_held_out(sizes: Sequence[int], held_out: float) -> list[Ints]:
    """Returns for each source the sorted indices of documents that are not used for training.

    A ``held_out`` below 1 is a share of all documents (at least one), else their number. The choice
    has no seed, so that runs with different seeds are evaluated on the same documents.
    """
    total = sum(sizes)
    count = max(1, round(held_out * total)) if 0 < held_out < 1 else held_out
    if not (0 <= count < total and count == int(count)):
        raise ValueError(
            f"held_out = {held_out} of {total} documents: give a share from 0 to below 1, or a"
            " whole number that leaves documents for training"
        )
    scores = np.concatenate(
        [hashes(np.arange(size), _HELD_OUT, number) for number, size in enumerate(sizes)]
    )
    is_held = np.zeros(total, np.bool_)
    is_held[np.argsort(scores, kind="stable")[: int(count)]] = True
    return [np.flatnonzero(part) for part in np.split(is_held, np.cumsum(sizes)[:-1])]


def _scramble(values: Hashes) -> Hashes:
    for shift, factor in _SCRAMBLE:
        values = (values ^ (values >> np.uint64(shift))) * np.uint64(factor)
    return values
