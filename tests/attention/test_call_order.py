"""In which order layers run backward: which orders are the usual one, and which are told."""

from __future__ import annotations

import pytest

from distca.attention.call_order import CallOrder


@pytest.mark.parametrize(
    ("calls", "distances"),
    [
        ("F F F B2 B1 B0", [0, 0, 0]),
        ("F F B1 F F B3 B2", [0, 0, 0]),  # the backward pass of the first layer was not asked for
        ("F F F F B3 B2 B1 B0", [0, 0, 0, 0]),
        ("F F F F B1 B0 B3 B2", [2, 0, -4, 0]),  # the older of two micro-batches first
        ("F F B0 B1", [1, -2]),
        ("F B0 B0", [0, -1]),  # the same graph twice
    ],
)
def test_distances_from_the_usual_order(calls: str, distances: list[int]) -> None:
    order, found, numbers = CallOrder(), [], []
    for call in calls.split():
        if call == "F":
            numbers.append(order.forward())
        else:
            found.append(order.backward(int(call[1:])))
    assert numbers == list(range(len(numbers)))
    assert order.newest == len(numbers) - 1
    assert found == distances
