"""Orders are permutations, all different; the choice of held-out documents is stable."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distca.data.shuffle import choose_held_out, hashes, shuffled


@given(st.integers(0, 300), st.lists(st.integers(0, 2**63 - 1), max_size=3))
def test_an_order_is_a_permutation(size: int, keys: list[int]) -> None:
    indices = np.arange(size) * 3
    assert np.array_equal(np.sort(shuffled(indices, *keys)), indices)


def test_every_key_gives_an_order_of_its_own() -> None:
    keys = [(seed, source, epoch) for seed in range(5) for source in range(5) for epoch in range(5)]
    orders = {tuple(shuffled(np.arange(50), *key).tolist()) for key in keys}
    assert len(orders) == len(keys)


def test_orders_are_even() -> None:
    """Each document comes in each place about equally often."""
    orders = np.stack([shuffled(np.arange(8), 0, 0, epoch) for epoch in range(4000)])
    often = np.stack([np.bincount(place, minlength=8) for place in orders.T])
    assert 400 < often.min() <= often.max() < 600  # 500 expected, with a deviation of 21


def test_the_hash_does_not_change() -> None:
    """Or else a saved state would mean other documents."""
    assert hashes(np.arange(3)).tolist() == [0, 16294208416658607535, 7960286522194355700]
    assert shuffled(np.arange(8), 1, 2, 3).tolist() == [0, 6, 1, 4, 7, 2, 5, 3]


@given(st.lists(st.integers(1, 60), min_size=1, max_size=4), st.floats(0, 0.99) | st.integers(1, 9))
def test_held_out_documents_are_as_many_as_asked_for(sizes: list[int], held_out: float) -> None:
    total = sum(sizes)
    count = held_out if held_out >= 1 else held_out and max(1, round(held_out * total))
    if count >= total:
        with pytest.raises(ValueError, match="that leaves documents for training"):
            choose_held_out(sizes, held_out)
        return
    chosen = choose_held_out(sizes, held_out)
    assert sum(map(len, chosen)) == count
    for indices, size in zip(chosen, sizes, strict=True):
        assert np.all(np.diff(indices) > 0)
        assert np.all((indices >= 0) & (indices < size))


@pytest.mark.parametrize("held_out", [-1, -0.1, 1.5, float("nan"), float("inf"), 10])
def test_what_cannot_be_held_out_is_refused(held_out: float) -> None:
    with pytest.raises(ValueError, match=r"held_out = .* of 10 documents: give a share from 0"):
        choose_held_out([4, 6], held_out)
