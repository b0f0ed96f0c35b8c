"""A bracketed secant search on integers, for many searches at once."""

from collections.abc import Callable

import numpy as np

from distca.planning.spans import Floats, Ints

SECANT_STEPS = 8  # smooth costs take two or three; after these, bisection ends in any case
LEAST_SLOPE = 1e-6  # loads are at least one picosecond
BISECTION_STEPS = 64  # halve any int64 bracket to one index


def first_fitting(
    excess: Callable[[Ints], Ints],
    guess: Ints,
    last: Ints,
    slope: Floats,
    origin: Ints,
    exact: float = 1.0,
) -> Ints:
    """Returns the smallest index in [0, last] that fits, for each search.

    An index fits if its excess is at most 0. If no index before ``last`` fits, ``last`` is
    returned, whether or not it fits. Loads of causal attention grow with the square of positions,
    so the secant is drawn through squares of positions.

    excess: maps indices [...] to excesses. That of a search must not rise with the index.
    guess: [...] where to start; any values are allowed.
    last: [...]
    slope: by how much the excess falls with the square of index - origin, about; it is estimated
        anew in each step.
    origin: the index of position 0. Indices before it count backwards from there.
    exact: the share of searches after which all end. The others return the smallest index that they
        have found to fit, or ``last``.
    """
    low, high = np.zeros_like(last), last  # the result is in [low, high]
    index, previous, before = guess, None, None
    num_exact = exact * last.size
    for step in range(SECANT_STEPS + BISECTION_STEPS):
        if step >= SECANT_STEPS:
            index = (low + high) // 2
        index = np.maximum(np.minimum(index, high - 1), low)  # ``high`` needs no look
        here = excess(index)
        fits = here <= 0
        high = np.where(fits, index, high)
        low = np.where(fits, low, np.minimum(index + 1, high))
        if np.count_nonzero(low == high) >= num_exact:
            break
        square = (index - origin) * np.abs(index - origin)
        if before is not None and previous is not None:
            fallen = (before - here) / np.where(square == previous, 1, square - previous)
            slope = np.where(fallen > 0, fallen, slope)
        before, previous = here, square
        square = square + here / np.maximum(slope, LEAST_SLOPE)
        index = origin + np.ceil(np.copysign(np.sqrt(np.abs(square)), square)).astype(np.int64)
    return high
