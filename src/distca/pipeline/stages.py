"""The layers of each pipeline stage, and how far the backward pass reaches when parts are frozen.

The parts of a model of L layers are numbered in the order of the forward pass: the embedding is 0,
the linear layers before the attention of layer l are 2l + 1, those after it 2l + 2, and the output
head is 2L + 1. What the backward pass must reach follows from one number: the first part that has a
trained parameter.
"""

from collections.abc import Sequence

Layers = tuple[int, int]  # the layers [start, stop) of a stage


def stage_layers(layers: int, stages: int, given: Sequence[int] = ()) -> tuple[Layers, ...]:
    """Returns [start, stop) of each stage: an even split, or the ``given`` numbers of layers.

    The earlier stages take the remainder of an even split, since the last one also has the head.
    """
    if layers < 1 or stages < 1:
        raise ValueError(f"{layers} layers on {stages} stages: both must be 1 or more")
    if stages > layers:
        raise ValueError(
            f"{layers} layers on {stages} stages: every stage needs a layer, so use at most"
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
    """Returns how many layers of a stage, counted from its last, run attention backward.

    The attention of layer l runs backward if one of the parts 0 to 2l + 1 is trained.
    """
    start, stop = stage
    return max(0, stop - max(start, first_trained_part // 2))


def sends_gradient(stage: Layers, first_trained_part: int) -> bool:
    """Returns whether a stage sends a gradient to the stage before it, which has trained parts."""
    start, _ = stage
    return start > 0 and first_trained_part <= 2 * start
