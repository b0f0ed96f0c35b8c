"""The time of one tick on every rank: walks the tick program that the runtime executes."""

from collections.abc import Sequence

from distca.pipeline.schedule import Phase
from distca.pipeline.tick_program import HALF_NAMES, TickProgram
from distca.planning.spans import Floats
from distca.sim.rates import Attention
from distca.sim.streams import Streams, Transfer


class Weights:
    """Gathers the weights of each seam one seam ahead, and reduces its gradients behind it.

    gathers, reduces: the transfers of each seam, in the order of execution; without ``reduces``,
        no gradients are reduced.
    """

    def __init__(
        self,
        streams: Streams,
        gathers: Sequence[Transfer | None],
        reduces: Sequence[Transfer | None] = (),
    ) -> None:
        self._streams, self._gathers, self._reduces = streams, gathers, reduces
        self._done = [streams.send("weights", gathers[0])]

    def enter(self, seam: int) -> None:
        """Starts to gather the next seam, and waits for the weights of this one."""
        if seam + 1 < len(self._gathers):
            self._done.append(self._streams.send("weights", self._gathers[seam + 1]))
        self._streams.wait(self._done[seam])

    def leave(self, seam: int) -> None:
        """Starts to reduce the gradients of a seam."""
        if self._reduces:
            self._streams.send("gradients", self._reduces[seam])


def run_tick(
    streams: Streams,
    phase: Phase,
    linear_s: Sequence[Sequence[Floats]],
    attention: Sequence[Sequence[Attention]],
    weights: Weights | None = None,
) -> None:
    """Runs one tick.

    linear_s: seconds of the linear layers, [seams][halves] in the order of execution.
    attention: the attention of each slot, [seams - 1][halves].
    weights: transfers of weights and gradients; None if no seam has any.
    """
    slots, halves = len(attention), len(linear_s[0])
    assert len(linear_s) == slots + 1
    arrival: dict[int, Floats] = {}  # when the transfer in progress of each half is done
    for section in TickProgram.of(slots, halves, phase).sections:
        seam = section[0].seam
        if weights is not None and seam is not None:
            weights.enter(seam)
        for operation in section:
            half, slot = operation.half, operation.slot
            name = f", {HALF_NAMES[half]}" if halves > 1 else ""
            if slot is None:
                assert seam is not None
                streams.run(f"linear{name}", linear_s[seam][half])
                continue
            one = attention[slot][half]
            match operation.kind:
                case "dispatch":
                    arrival[half] = streams.send(f"dispatch{name}", one.dispatch)
                case "compute":
                    streams.run(f"attention, local{name}", one.local_s)
                    streams.wait(arrival[half])
                    streams.run(f"attention{name}", one.remote_s)
                    arrival[half] = streams.send(f"combine{name}", one.combine)
                case "combine":
                    streams.wait(arrival[half])
        if weights is not None and seam is not None:
            weights.leave(seam)
