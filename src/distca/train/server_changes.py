"""What becomes of the dedicated servers of a run: records for ``metrics.jsonl``, and sentences."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Loss:
    """A dedicated server that a run has lost and done without.

    noticed_at: in seconds since 1970.
    during: what was repeated without it.
    seconds: from the notice until that was done.
    servers: how many are left.
    """

    rank: int
    how: str
    noticed_at: float
    during: str
    seconds: float
    servers: int

    def __str__(self) -> str:
        return (
            f"rank {self.rank}, a dedicated server, was lost in {self.during} ({self.how}), which"
            f" was done again {_with(self.servers)} {self.seconds:.1f} s later"
        )


@dataclass(frozen=True)
class Change:
    """A dedicated server that has joined or left a run between two steps.

    at: in seconds since 1970.
    before: the step that is the first one with it, or without it.
    seconds: how long it took.
    servers: how many there are now.
    """

    rank: int
    joined: bool
    at: float
    before: str
    seconds: float
    servers: int

    def __str__(self) -> str:
        how = "has joined" if self.joined else "has left on request"
        return (
            f"rank {self.rank}, a dedicated server, {how} before {self.before}, which goes on"
            f" {_with(self.servers)} after {self.seconds:.1f} s"
        )


def _with(servers: int) -> str:
    s = "" if servers == 1 else "s"
    return f"with {servers} server{s}" if servers else "without servers"
