"""A bracketed secant search on integers, for many searches at once."""

from collections.abc import Callable

import numpy as np

from distca.planning.spans import Floats, Ints

SECANT_STEPS = 8  # smooth costs take two or three; after these, bisection ends in any case
BISECTION_STEPS = 64  # halve any int64 bracket to one index


def first_fitting(
    excess: Callable[[Ints], Ints], guess: Ints, last: Ints, slope: Floats | float
) -> Ints:
    """Returns the smallest index in [0, last] that fits, for each search.

    An index fits if its excess is at most 0. If no index before ``last`` fits, ``last`` is
    returned, whether or not it fits.

    excess: maps indices [...] to excesses. That of a search must not rise with the index.
    guess: [...] where to start; any values are allowed.
    last: [...]
    slope: by how much the excess falls with the index, about; it is estimated anew in each step.
    """
    low, high = np.zeros_like(last), last  # the result is in [low, high]
    index, previous, here = guess, guess, None
    for step in range(SECANT_STEPS + BISECTION_STEPS):
        if step >= SECANT_STEPS:
            index = (low + high) // 2
        index = np.maximum(np.minimum(index, high - 1), low)  # ``high`` needs no look
        before, here = here, excess(index)
        if before is not None:
            fallen = (before - here) / np.where(index == previous, 1, index - previous)
            slope = np.where(fallen > 0, fallen, slope)
        previous = index
        fits = here <= 0
        high = np.where(fits, np.minimum(index, high), high)
        low = np.where(fits, low, np.minimum(index + 1, high))
        if (low == high).all():
            break
        index = index + np.ceil(here / np.maximum(slope, 1.0)).astype(np.int64)
    return high
