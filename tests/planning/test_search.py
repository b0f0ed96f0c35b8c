"""The search for cuts finds what a scan of all indices finds, in few steps."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distca.planning.search import first_fitting, root, square
from distca.planning.spans import Ints, as_ints


def scan(excess: list[int]) -> int:
    """Returns the first index that fits, or the last one."""
    return next((index for index, value in enumerate(excess[:-1]) if value <= 0), len(excess) - 1)


@given(
    falling=st.lists(st.integers(-(10**13), 10**13), min_size=1, max_size=60),
    guess=st.integers(-5, 70),
    slope=st.sampled_from([0.0, 1.0, 1e9]),
    origin=st.integers(-10, 70),
    linear_from=st.sampled_from([None, 0.01, 3.5, 1e12]),
)
def test_any_falling_function(
    falling: list[int], guess: int, slope: float, origin: int, linear_from: float | None
) -> None:
    falling = sorted(falling, reverse=True)
    values, last = as_ints(falling), as_ints([len(falling) - 1])
    found = first_fitting(
        values.__getitem__,
        as_ints([guess]),
        last,
        np.array([slope]),
        as_ints([origin]),
        linear_from=None if linear_from is None else np.array([linear_from]),
    )
    assert found.tolist() == [scan(falling)]


def test_squares_of_positions_take_few_steps_from_anywhere() -> None:
    """Loads from a position up to the end of a document, and from its start down to a position."""
    last, guess = np.full((1, 300), 256), np.arange(300)[None] % 257
    steps = 0

    def above(index: Ints) -> Ints:
        nonlocal steps
        steps += 1
        return 1000 * (256**2 - index**2) - 1000 * 256 * guess

    def below(index: Ints) -> Ints:
        return above(index - 256)

    slope, zero = np.array([900.0]), as_ints(0)
    found = first_fitting(above, 0 * guess, last, slope, zero)
    assert np.all((above(found) <= 0) & (above(found - 1) > 0) | (found == 0))
    assert steps <= 6
    assert np.array_equal(first_fitting(above, guess, last, slope, zero), found)
    steps = 0
    first_fitting(lambda index: -below(256 - index) - 10**7, 0 * guess, last, slope, last)
    assert steps <= 6


@pytest.mark.parametrize("window", [0.01, 4.0, 100.0, 1e12])
def test_loads_of_windows_take_few_steps_from_anywhere(window: float) -> None:
    """Secants through squares alone would take up to seven."""
    last, guess = np.full((1, 300), 2048), np.arange(300)[None] * 2048 // 300
    linear_from = np.array([window])
    whole = square(last, linear_from)
    steps = 0

    def above(index: Ints) -> Ints:
        nonlocal steps
        steps += 1
        return np.rint(1000 * (whole - square(index, linear_from) - whole * guess / 2048)).astype(
            np.int64
        )

    slope, zero = np.array([300.0]), as_ints(0)
    found = first_fitting(above, np.flip(guess), last, slope, zero, linear_from=linear_from)
    assert steps <= 5
    assert np.all((above(found) <= 0) & (above(found - 1) > 0) | (found == 0))


@given(distance=st.integers(-(10**6), 10**6), linear_from=st.sampled_from([None, 0.01, 32.0, 1e12]))
def test_roots_undo_squares(distance: int, linear_from: float | None) -> None:
    bend = None if linear_from is None else np.array([linear_from])
    squares = square(as_ints([distance, distance + 1]), bend)
    assert squares[0] < squares[1]
    assert np.allclose(root(squares, bend), [distance, distance + 1], rtol=1e-9, atol=1e-6)


@given(
    falling=st.lists(
        st.lists(st.integers(-1000, 1000), min_size=20, max_size=20), min_size=1, max_size=30
    ),
    exact=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
)
def test_searches_that_end_early_find_an_index_that_fits(
    falling: list[list[int]], exact: float
) -> None:
    values = -np.sort(-as_ints(falling), axis=1)
    row, last = np.arange(len(values)), np.full(len(values), 19)
    found = first_fitting(
        lambda index: values[row, index], 0 * last, last, np.ones(len(values)), 0 * last, exact
    )
    assert np.all((values[row, found] <= 0) | (found == last))
    best = as_ints([scan(one) for one in values.tolist()])
    assert np.count_nonzero(found == best) >= exact * len(values)
