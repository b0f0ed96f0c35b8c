"""``distca serve``: a dedicated attention server that joins a run."""

import os
import signal
from dataclasses import dataclass

import typer

from distca.cli.command import option
from distca.runtime import launched
from distca.runtime.rank_process import LOOPBACK, loopback_interface


@dataclass(frozen=True, kw_only=True)
class ServeCommand:
    """Serves attention in a run that is under way.

    Joins between two steps, and takes the config from the run.
    Ctrl-C leaves between two steps; the run goes on.

    For example: distca serve --join node-1:29500
    """

    join: str = option("HOST:PORT", "The store of the run, which shows it at its start.", "")

    def run(self) -> None:
        if not self.join:
            raise ValueError("distca serve needs --join HOST:PORT, as the run shows it")
        # A store that is gone is told below; torch would also show the stack of its C++ code.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        with launched.reporting():
            from distca.runtime.joining import Run
            from distca.runtime.lost_ranks import naming_lost_ranks
            from distca.train.serve import serve

            # Both signals ask for the same: to leave between two steps.
            signal.signal(signal.SIGINT, lambda *_: signal.raise_signal(signal.SIGTERM))
            if self.join.startswith((f"{LOOPBACK}:", "localhost:")):  # as the ranks of a launcher
                for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                    os.environ.setdefault(name, loopback_interface())
            # A server that the launcher starts again gets the number that it had.
            wish = int(os.environ["RANK"]) if launched.is_rank() else None
            with naming_lost_ranks():
                serve(Run.at(self.join), wish=wish, tell=lambda words: typer.echo(words))
