"""A bracketed Newton search on integers, for many searches at once."""

from collections.abc import Callable

import numpy as np

from distca.planning.spans import Ints, as_ints

NEWTON_STEPS = 8  # smooth costs take two or three; after these, bisection ends in any case
BISECTION_STEPS = 64  # halve any int64 bracket to one index
_BEFORE_AND_AT = as_ints([[1], [0]])  # subtracted from indices: the index before, and the index


def first_fitting(excess: Callable[[Ints], Ints], guess: Ints, last: Ints) -> tuple[Ints, Ints]:
    """Returns the smallest index in [0, last] that fits, and its excess, for each search.

    An index fits if its excess is at most 0. If ``last`` itself does not fit, it is returned.

    excess: maps indices [2, searches] to excesses of the same shape, where column i belongs to
        search i. The excess of a search must not rise with the index.
    guess: [searches] where to start; any values are allowed.
    last: [searches]
    """
    low, high = np.zeros_like(last), last.copy()  # the result is in [low, high]
    index = np.minimum(np.maximum(guess, low), high)
    for step in range(NEWTON_STEPS + BISECTION_STEPS):
        before, here = excess(np.maximum(index - _BEFORE_AND_AT, 0))
        fits, is_first = here <= 0, (before > 0) | (index == 0)
        if ((fits & is_first) | (low == high)).all():
            break
        high = np.where(fits, np.where(is_first, index, index - 1), high)
        low = np.minimum(np.where(fits, np.where(is_first, index, low), index + 1), high)
        if step < NEWTON_STEPS:
            slope = np.maximum(before - here, 1)
            index = np.minimum(np.maximum(index - (-here // slope), low), high)
        else:
            index = (low + high) // 2
    return index, here
