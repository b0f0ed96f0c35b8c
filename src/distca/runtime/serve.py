"""Takes part in the attention slots of a tick without layers of its own.

Layers of its own run in ``Llama.forward`` and, in a backward tick, in the autograd nodes that it
has created. Both go through the same operations in the same order, with linear layers in between.
"""

from collections.abc import Sequence

from distca.attention.passes import BackwardPass, ForwardPass
from distca.pipeline.schedule import FORWARD, Phase
from distca.pipeline.tick_program import TickProgram
from distca.runtime.prepared import PreparedSlot


def serve(slots: Sequence[PreparedSlot], phase: Phase) -> None:
    """Executes the program of a tick without queries, keys and values of its own."""
    halves = len(slots[0]) if slots else 0
    dispatch = ForwardPass.without_rows if phase == FORWARD else BackwardPass.without_rows
    passes: dict[int, ForwardPass | BackwardPass] = {}
    for operation in TickProgram.of(len(slots), halves, phase).operations:
        half = operation.half
        match operation.kind:
            case "dispatch":
                assert operation.slot is not None
                passes[half] = dispatch(slots[operation.slot][half])
            case "compute":
                passes[half].compute()
            case "combine":
                passes.pop(half).combine()
