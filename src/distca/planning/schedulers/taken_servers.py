"""Servers that several ranks take at once."""

from distca.planning.schedulers.cuts import Cut, Piece
from distca.planning.schedulers.ledger import Ledger

MANY = 4  # surpluses of a rank that fit into the headroom of a server that it shares with others


def may_share(ledger: Ledger, server: int, surplus: int) -> bool:
    """Returns whether other ranks may take a server too: it is dedicated, with much headroom.

    A few dedicated servers beside many workers take pieces of all of them. If one rank took each
    server at a time, most ranks would wait.
    """
    return ledger.is_dedicated(server) and ledger.loads.headroom(server) >= MANY * surplus


class TakenServers:
    """Pieces that ranks want to move at the same time, by server."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._pieces: dict[int, list[tuple[int, Piece]]] = {}  # server -> shards and their pieces

    def __contains__(self, server: object) -> bool:
        return server in self._pieces

    def add(self, cut: Cut) -> None:
        for piece in cut.pieces:
            self._pieces.setdefault(piece.server, []).append((cut.shard, piece))

    def leave_room_for(self, cut: Cut) -> bool:
        """Returns whether all servers of a cut are free, or dedicated ones that can take it too."""
        return all(self._fits(cut.shard, piece) for piece in cut.pieces if piece.server in self)

    def _fits(self, shard: int, piece: Piece) -> bool:
        ledger, server = self._ledger, piece.server
        if not ledger.is_dedicated(server):
            return False
        together = [*self._pieces[server], (shard, piece)]
        load = sum(one.load for _, one in together)
        used_bytes = sum(
            ledger.shards.memory_bytes(ledger.shards.document[shard], one.span)
            for shard, one in together
        )
        return load <= ledger.loads.headroom(server) and used_bytes <= ledger.free_bytes[server]
