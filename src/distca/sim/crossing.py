"""One pass through layers on every lane, as ``runtime.step`` runs it.

    seam 0     part(ping) launch(ping)  part(pong) launch(pong)
    slot 0     compute(ping)  compute(pong)
    seam 1     wait(ping) part(ping) launch(ping)  wait(pong) part(pong) launch(pong)
    ...

Backward is the same in reverse, so one program serves both ways with its own seconds.
"""

from __future__ import annotations

from collections.abc import Sequence

from distca.planning.spans import Floats
from distca.sim.rates import Attention
from distca.sim.streams import Exchange, Streams

HALVES = ("", ", pong")


class Weights:
    """Of every seam: gathered one seam ahead; gradients reduced behind it, if it learns."""

    def __init__(
        self,
        streams: Streams,
        gathering: Sequence[Exchange | None],
        reducing: Sequence[Exchange | None] = (),
    ) -> None:
        self._streams, self._gathering, self._reducing = streams, gathering, reducing
        self._done = [streams.send("weights", gathering[0])]

    def enter(self, seam: int) -> None:
        if seam + 1 < len(self._gathering):
            self._done.append(self._streams.send("weights", self._gathering[seam + 1]))
        self._streams.wait(self._done[seam])

    def leave(self, seam: int) -> None:
        if self._reducing:
            self._streams.send("gradients", self._reducing[seam])


def cross(
    streams: Streams,
    parts: Sequence[Sequence[Floats]],
    slots: Sequence[Sequence[Attention]],
    weights: Weights | None = None,
) -> None:
    """parts: seconds of each seam and half, [slots + 1][halves]; slots: [slots][halves]."""
    assert len(parts) == len(slots) + 1
    away: list[Floats] = []
    home: list[Floats] = []
    for seam, part in enumerate(parts):
        if weights is not None:
            weights.enter(seam)
        attentions = slots[seam] if seam < len(slots) else ()
        away, arriving = [], home
        for half, seconds in enumerate(part):
            if arriving:
                streams.wait(arriving[half])
            streams.run(f"linear{HALVES[half]}", seconds)
            if attentions:
                away.append(streams.send(f"dispatch{HALVES[half]}", attentions[half].out))
        if weights is not None:
            weights.leave(seam)
        home = []
        for half, attention in enumerate(attentions):
            streams.run(f"attention, own{HALVES[half]}", attention.local_s)
            streams.wait(away[half])
            streams.run(f"attention{HALVES[half]}", attention.remote_s)
            home.append(streams.send(f"return{HALVES[half]}", attention.back))
