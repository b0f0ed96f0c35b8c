"""Which job of torchrun has begun the run in a folder, so that its restarts continue the run.

What a command says about its beginning (``--no-resume``, ``--from``) holds until the run has begun:
what was to be left out is set aside then. Our own launcher tells that to the ranks that it starts
again; torchrun starts them with the same command.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from distca.runtime.disk import writing
from distca.runtime.launched import is_launched, num_restarts


@dataclass(frozen=True)
class TorchrunJob:
    """The job that has started this rank, if torchrun has, and its mark in the folder of a run."""

    folder: Path

    def forget_earlier(self) -> None:
        """Removes the mark of an earlier job, which may have had the same name, as by default."""
        if self._name is not None and num_restarts() == 0:
            self._mark.unlink(missing_ok=True)

    def has_begun(self) -> bool:
        """Returns whether these ranks are started again after they had begun the run."""
        restarts = self._name is not None and num_restarts() > 0
        return restarts and self._mark.is_file() and self._mark.read_text() == self._name

    def begin(self) -> None:
        """Marks the run as begun by this job."""
        if self._name is not None:
            with writing(self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)
                self._mark.write_text(self._name)

    @property
    def _mark(self) -> Path:
        return self.folder / "torchrun-job"

    @property
    def _name(self) -> str | None:
        return None if is_launched() else os.environ.get("TORCHELASTIC_RUN_ID")
