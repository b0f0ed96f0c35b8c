"""The attempts of ``distca train`` to reach its end: restarts, with fewer ranks if need be."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from distca.runtime.launched import RankEndedError, RankFailedError, sentence
from distca.runtime.rank_watch import Stop

if TYPE_CHECKING:
    from distca.train.config import Config

# With these local ranks, as restart n; and whether an earlier attempt has begun to train, and with
# it set aside what the run was not to continue from.
RunOnce = Callable[[Sequence[int], int, bool], Stop | None]


@dataclass(frozen=True)
class Attempts:
    """How often ranks are started again, and with how many of them.

    min_ranks: as many are left at least; None if all are needed.
    check: raises ValueError if a number of ranks is no mesh.
    """

    config: "Config"
    max_restarts: int
    min_ranks: int | None
    check: Callable[[int], object]

    def run(self, num_ranks: int, run_once: RunOnce) -> Stop | None:
        """Starts ranks, again if some were killed; returns the signal that has ended them."""
        local_ranks, has_begun = list(range(num_ranks)), False
        for restart in range(self.max_restarts):
            try:
                return run_once(local_ranks, restart, has_begun)
            except RankEndedError as error:
                if error.stop_requested:
                    raise
                has_begun |= error.had_started
                if restart and not error.had_started and self.min_ranks is not None:
                    local_ranks = self._without(error, local_ranks)
                fewer = f", with {len(local_ranks)} ranks" if len(local_ranks) < num_ranks else ""
                typer.echo(f"distca: {self._words(error, restart + 1, has_begun)}{fewer}", err=True)
        return run_once(local_ranks, self.max_restarts, has_begun)

    def _without(self, error: RankEndedError, local_ranks: list[int]) -> list[int]:
        """Returns local ranks without one that does not start, as many as the mesh allows.

        Raises RankFailedError if too few are left.
        """
        gone = len(local_ranks) - 1 if error.rank is None else error.rank
        left = [*local_ranks[:gone], *local_ranks[gone + 1 :]]
        why = f"--min-ranks is {self.min_ranks}"
        for size in range(len(left), (self.min_ranks or 1) - 1, -1):
            try:
                self.check(size)
            except ValueError as mistake:
                why = str(mistake)
            else:
                return left[:size]
        raise RankFailedError(f"{sentence(error)}; the run cannot go on with fewer ranks: {why}")

    def _words(self, error: Exception, number: int, has_begun: bool) -> str:
        from distca.train.step_folders import newest

        config = self.config
        found = newest(Path(config.out) / "checkpoints")
        where = f"from {found}" if found else "from the beginning, since there is no checkpoint"
        if not has_begun and not config.resume:
            where = "from the beginning"
        elif not has_begun and config.from_step >= 0:
            where = f"from step {config.from_step}"
        return f"{sentence(error)}; restart {number} of {self.max_restarts} {where}"


@contextmanager
def tell_what_is_saved(out: Path) -> Iterator[None]:
    """Names the last checkpoint when a second signal has ended the ranks.

    Whether they had saved before cannot be told from the signal alone.
    """
    from distca.train.step_folders import newest

    try:
        yield
    except KeyboardInterrupt:
        found = newest(out / "checkpoints")
        last = f"the last checkpoint is {found}" if found else "there is no checkpoint"
        typer.echo(f"ended at once by a second signal: {last}", err=True)
        raise
