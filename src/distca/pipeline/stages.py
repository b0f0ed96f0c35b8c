"""Which layers a pipeline stage has, and which of them go backward when parts are frozen.

The parts of a model of L layers are numbered in the order of the forward: the embedding is 0, what
comes before the attention of layer l is 2l + 1, what comes after it 2l + 2, the head 2L + 1. All
that the backward must reach follows from one number, the first part with a parameter that learns.
"""

from __future__ import annotations

from collections.abc import Sequence

Layers = tuple[int, int]  # [start, stop) of a stage


def stage_layers(layers: int, stages: int, given: Sequence[int] = ()) -> tuple[Layers, ...]:
    """[start, stop) of each stage: an even split, or the ``given`` counts of layers.

    Where the split leaves a remainder the earlier stages take it, as the last has the head too.
    """
    if layers < 1 or stages < 1:
        raise ValueError(f"{layers} layers on {stages} stages: both must be 1 or more")
    if stages > layers:
        raise ValueError(
            f"{layers} layers on {stages} stages: every stage needs a layer, so take at most"
            f" {layers} stages"
        )
    each, rest = divmod(layers, stages)
    counts = list(given) or [each + (stage < rest) for stage in range(stages)]
    way_out = "or give none for an even split"
    if len(counts) != stages:
        raise ValueError(
            f"layer counts {counts} are {len(counts)} but there are {stages} stages: give one for"
            f" each stage, {way_out}"
        )
    if min(counts) < 1:
        raise ValueError(
            f"layer counts {counts} leave stage {counts.index(min(counts))} with {min(counts)}:"
            f" give every stage 1 or more, {way_out}"
        )
    if sum(counts) != layers:
        raise ValueError(
            f"layer counts {counts} sum to {sum(counts)} but the model has {layers} layers:"
            f" give counts that sum to {layers}, {way_out}"
        )
    stops = [sum(counts[: stage + 1]) for stage in range(stages)]
    return tuple((stop - count, stop) for stop, count in zip(stops, counts, strict=True))


def backward_layers(stage: Layers, first_trained_part: int) -> int:
    """How many of the stage's layers, from its last one down, have an attention that goes backward.

    The attention of layer l does if ``first_trained_part`` is one of those before it, up to 2l + 1.
    """
    start, stop = stage
    return max(0, stop - max(start, first_trained_part // 2))


def gradient_enters(stage: Layers, first_trained_part: int) -> bool:
    """Whether the stage sends a gradient to the one before it, as some part before it learns."""
    start, _ = stage
    return start > 0 and first_trained_part <= 2 * start
