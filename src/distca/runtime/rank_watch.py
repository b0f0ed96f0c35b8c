"""What a launcher waits for: reports of ranks over their sockets, and the end of each.

The first failure is the one that is raised; others may follow from it.
"""

import selectors
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from distca.runtime.launched import RankEndedError, RankFailedError
from distca.runtime.rank_process import RankProcess

DEATH_S = 0.5  # how long a killed rank may take to be reported as dead


@dataclass(frozen=True)
class Stop:
    """The ranks ended because of a signal."""

    signal: signal.Signals
    early: bool  # a rank ended before it could handle the signal, and before the work was done


class RankWatch:
    """Waits for the end of ranks.

    rejoin: starts a spare rank again; returns None if that may not be.
    """

    def __init__(
        self,
        ranks: Sequence[RankProcess],
        received: Sequence[signal.Signals],
        rejoin: Callable[[int], RankProcess | None],
        tell: Callable[[str], None],
    ) -> None:
        self._ranks, self._received, self._rejoin, self._tell = ranks, received, rejoin, tell
        self.has_started = False  # whether spare ranks may be lost
        self.has_finished = False  # whether a rank has done all its work
        self._working: set[RankProcess] = set()

    def run(self) -> Stop | None:
        """Returns when all ranks have ended, or raises the first failure."""
        with selectors.DefaultSelector() as selector:
            for rank in self._ranks:
                selector.register(rank.channel, selectors.EVENT_READ, rank)
            while any(not key.data.joins for key in selector.get_map().values()):
                events = [(key.data, key.data.reports()) for key, _ in selector.select()]
                for rank, reports in sorted(events, key=_urgency):
                    for report in reports:
                        self._handle(rank, report)
                    if reports:
                        continue
                    selector.unregister(rank.channel)
                    code = rank.exit_code()
                    if self._received and code == -signal.SIGTERM and not rank.joins:
                        return Stop(self._received[0], early=not self.has_finished)
                    if code and not rank.is_spare:
                        _raise_ended(rank, code)
                    if code and self.has_started and (again := self._rejoin(rank.number)):
                        self._tell(f"{rank.ended(code)}; it is started again ({again.log})")
                        selector.register(again.channel, selectors.EVENT_READ, again)
        return Stop(self._received[0], early=False) if self._received else None

    def _handle(self, rank: RankProcess, report: Mapping[str, Any]) -> None:
        if "started" in report:
            self.has_started = True
            self._working.add(rank)
        elif "finished" in report:
            self.has_finished |= not rank.is_spare  # a spare one may leave before the end
        elif "lost" in report:
            self._end_lost(report["lost"], report["noticed_at"])
        elif rank.joins:
            self._tell(f"rank {rank.number} has not joined: {report['message']}")
        elif rank.is_spare and (self.has_started or not report["mistake"]):
            pass  # it ends, and the others know
        else:
            if not report["mistake"] and (killed := _killed(self._ranks)):
                _raise_ended(killed, killed.process.returncode)
            _raise_reported(rank, report)

    def _end_lost(self, number: int, noticed_at: float) -> None:
        """Kills a rank that the others have given up, but that may live, and hold a device."""
        for rank in self._working:
            # The rank may be dead, and its number that of one that was started again.
            is_meant = rank.number == number and rank.started_at < noticed_at
            if is_meant and rank.is_spare and rank.process.poll() is None:
                rank.kill()


def _urgency(event: tuple[RankProcess, Sequence[Mapping[str, Any]]]) -> int:
    """Orders what arrives together: deaths before errors, of which they may be the cause.

    Before both, that the work is done: then a death by a signal that we forward is no loss.
    """
    _, reports = event
    return 0 if any("finished" in one for one in reports) else 1 + bool(reports)


def _killed(ranks: Sequence[RankProcess]) -> RankProcess | None:
    """Returns a rank that a signal has killed, if there is one, and that the others needed.

    Other ranks may report its absence a moment before its death can be seen.
    """
    deadline = time.monotonic() + DEATH_S
    while time.monotonic() < deadline:
        for rank in ranks:
            if (rank.process.poll() or 0) < 0 and not rank.is_spare:
                return rank
        time.sleep(0.01)
    return None


def _raise_reported(rank: RankProcess, report: Mapping[str, Any]) -> NoReturn:
    if report["mistake"]:
        raise ValueError(report["message"])
    if report["explained"]:
        ended = report["kind"] == RankEndedError.__name__
        raise (RankEndedError if ended else RankFailedError)(report["message"])
    why = ": ".join(filter(None, (report["kind"], report["message"])))
    error = RankEndedError(f"rank {rank.number} failed with {why}; its output is in {rank.log}")
    error.rank = rank.number
    raise error


def _raise_ended(rank: RankProcess, code: int) -> NoReturn:
    error = RankEndedError(
        f"{rank.ended(code)}, so all ranks were ended; its output is in {rank.log}"
    )
    error.rank = rank.number
    raise error
