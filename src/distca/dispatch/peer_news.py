"""What ranks learn about each other over the host: who is lost, and who goes on."""

from __future__ import annotations

import time
from typing import NamedTuple

from distca.dispatch.hub import LOST
from distca.dispatch.transports.base import ExchangeError


class Members(NamedTuple):
    """The ranks that go on, and the candidates that join them, with new groups.

    ranks: global ranks.
    candidates: the number of each, and the global rank that it wishes to have or None.
    name: a name for the groups that nothing else has.
    """

    ranks: list[int]
    candidates: list[tuple[int, int | None]]
    name: str


class PeerLostError(ExchangeError):
    """Raised when a rank has ended, or its node is gone, while others still need it.

    rank: its global rank.
    how: in words.
    noticed_at: when this rank noticed it, in seconds since 1970.
    """

    def __init__(self, message: str, rank: int, how: str = LOST) -> None:
        super().__init__(message)
        self.rank, self.how, self.noticed_at = rank, how, time.time()
