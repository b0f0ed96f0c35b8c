"""Layers of stages, and how far the backward pass reaches when the first parts are frozen."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distca.pipeline.stages import backward_layers, sends_gradient, stage_layers


@given(st.integers(1, 20), st.integers(1, 20))
def test_an_even_split_covers_every_layer_and_favors_the_last_stage(
    layers: int, stages: int
) -> None:
    if stages > layers:
        with pytest.raises(ValueError, match=f"use at most {layers} stages"):
            stage_layers(layers, stages)
        return
    ranges = stage_layers(layers, stages)
    assert [layer for start, stop in ranges for layer in range(start, stop)] == list(range(layers))
    counts = [stop - start for start, stop in ranges]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] - counts[-1] <= 1


def test_counts_may_be_given() -> None:
    assert stage_layers(7, 3, [1, 4, 2]) == ((0, 1), (1, 5), (5, 7))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1), "0 layers on 1 stages: both must be 1 or more"),
        ((4, 0), "4 layers on 0 stages: both must be 1 or more"),
        ((4, 2, [4]), "layer counts [4] are 1 but there are 2 stages: give one for each stage"),
        ((4, 2, [4, 0]), "layer counts [4, 0] leave stage 1 with 0: give every stage 1 or more"),
        ((4, 2, [2, 1]), "layer counts [2, 1] sum to 3 but the model has 4 layers: give counts"),
    ],
)
def test_nonsense_is_refused(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        stage_layers(*arguments)


@given(st.integers(1, 8), st.data())
def test_the_backward_pass_ends_at_the_first_trained_part(layers: int, data: st.DataObject) -> None:
    """Against the definitions, for a model frozen up to any part, or whole."""
    ranges = stage_layers(layers, data.draw(st.integers(1, layers)))
    trained = data.draw(st.sets(st.integers(0, 2 * layers + 1)))
    first_trained_part = min(trained, default=2 * layers + 2)
    for stage in ranges:
        backward = [any(part <= 2 * layer + 1 for part in trained) for layer in range(*stage)]
        assert backward_layers(stage, first_trained_part) == sum(backward)
        assert backward == sorted(backward)
        start = stage[0]
        sends = start > 0 and any(part <= 2 * start for part in trained)
        assert sends_gradient(stage, first_trained_part) == sends


def test_parts_on_the_border_of_a_stage() -> None:
    stage = (2, 4)
    assert backward_layers(stage, 4) == 2  # after the attention of layer 1, in the stage before
    assert sends_gradient(stage, 4)
    assert backward_layers(stage, 5) == 2  # before the attention of layer 2, its own first part
    assert not sends_gradient(stage, 5)
    assert backward_layers(stage, 6) == 1
    assert backward_layers(stage, 8) == 0  # after its last attention
    assert not sends_gradient((0, 2), 0)
