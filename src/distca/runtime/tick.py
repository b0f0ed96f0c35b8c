"""Executes the program of a tick on this rank, with layers of its own or only serving.

A backward tick of a rank with layers of its own is not executed here: autograd runs the nodes that
``StageForward`` created, in the order of the backward program (``distca.pipeline.tick_program``).
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from distca.attention.overlap import AsyncAttention
from distca.attention.passes import BackwardPass, ForwardPass
from distca.model.llama import Arriving, Leaving, Part, Seam
from distca.pipeline.schedule import FORWARD, Phase
from distca.pipeline.tick_program import Operation, TickProgram
from distca.runtime.prepared import PreparedSlot


class StageForward:
    """Runs the halves of a micro-batch forward through the seams of a stage.

    slots: the prepared plans of the stage's layers, one slot for each layer.
    recompute: checkpoints the linear layers of a seam. Dispatch and combine stay outside of the
        checkpointed region; inside, they would exchange again in the backward pass.
    """

    def __init__(self, slots: Sequence[PreparedSlot], *, recompute: bool) -> None:
        self._slots, self._recompute = slots, recompute
        self._attention: dict[int, AsyncAttention] = {}  # the attention in progress of each half

    def __call__(self, seams: Sequence[Seam], halves: list[Arriving]) -> list[Leaving]:
        leaving: list[Leaving] = []
        for section in TickProgram.of(len(self._slots), len(halves), FORWARD).sections:
            seam = section[0].seam
            if seam is None:
                for operation in section:
                    self._attention[operation.half].compute()
            else:
                leaving = seams[seam](halves, partial(self._run_seam, section))
                halves = [a._replace(x=b.x) for a, b in zip(halves, leaving, strict=True)]
        return leaving

    def _run_seam(
        self, section: Sequence[Operation], part: Part, halves: Sequence[Arriving]
    ) -> list[Leaving]:
        """Executes the operations of one seam, inside the call of its module.

        The result contains q, k and v, because FSDP gathers the seam's parameters for the backward
        pass when the gradient of one of its outputs is computed.
        """
        outputs: dict[int, Tensor] = {}
        leaving: dict[int, Leaving] = {}
        for operation in section:
            half = operation.half
            match operation.kind:
                case "combine":
                    outputs[half] = self._attention.pop(half).combine()
                case "linear":
                    arriving = halves[half]._replace(attended=outputs.pop(half, None))
                    leaving[half] = self._linear(part, arriving)
                case "dispatch":
                    qkv, slot = leaving[half].qkv, operation.slot
                    assert qkv is not None
                    assert slot is not None
                    self._attention[half] = AsyncAttention(self._slots[slot][half], *qkv)
        return [leaving[half] for half in range(len(halves))]

    def _linear(self, part: Part, half: Arriving) -> Leaving:
        if not self._recompute or not torch.is_grad_enabled():
            return part(half)
        leaving: Leaving = checkpoint(part, half, use_reentrant=False)
        return leaving


def serve(slots: Sequence[PreparedSlot], phase: Phase) -> None:
    """Takes part in attention slots without queries, keys and values of its own."""
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
