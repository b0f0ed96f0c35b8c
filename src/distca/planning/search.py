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
    linear_from: Floats | None = None,
) -> Ints:
    """Returns the smallest index in [0, last] that fits, for each search.

    An index fits if its excess is at most 0. If no index before ``last`` fits, ``last`` is
    returned, whether or not it fits. Loads of causal attention grow with the square of positions,
    so the secant is drawn through squares of positions; see ``square``.

    excess: maps indices [...] to excesses. That of a search must not rise with the index.
    guess: [...] where to start; any values are allowed.
    last: [...]
    slope: by how much the excess falls with the square of index - origin, about; it is estimated
        anew in each step.
    origin: the index of position 0. Indices before it count backwards from there.
    exact: the share of searches after which all end. The others return the smallest index that they
        have found to fit, or ``last``.
    linear_from: the distance from the origin beyond which loads grow linearly; None: nowhere.
    """
    low, high = np.zeros(last.shape, np.int64), last  # the result is in [low, high]
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
        place = square(index - origin, linear_from)
        if before is not None and previous is not None:
            distance = place - previous
            fallen = (before - here) / np.where(distance == 0, 1, distance)
            slope = np.where(fallen > 0, fallen, slope)
        before, previous = here, place
        place = place + here / np.maximum(slope, LEAST_SLOPE)
        index = origin + np.ceil(root(place, linear_from)).astype(np.int64)
    return high


def square(distance: Ints, linear_from: Floats | None) -> Ints | Floats:
    """Returns squares of distances, which beyond ``linear_from`` continue along their tangent.

    Such are the loads of a window: every query sees more keys than the one before, until all see
    equally many. Those of negative distances are negative.
    """
    if linear_from is None:
        return distance * np.abs(distance)
    size = np.abs(distance)
    curved = np.minimum(size, linear_from)
    return np.copysign(curved * (2.0 * size - curved), distance)


def root(place: Floats, linear_from: Floats | None) -> Floats:
    """Returns the distances that have these squares."""
    size = np.abs(place)
    distance = np.sqrt(size)
    if linear_from is not None:
        line = (size / linear_from + linear_from) / 2.0
        distance = np.where(distance > linear_from, line, distance)
    return np.copysign(distance, place)
