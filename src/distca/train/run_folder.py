"""The folder of a run: who holds it, what a run continues from, and its records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from distca.runtime.disk import writing
from distca.runtime.launched import is_launched
from distca.runtime.mesh import RankContext
from distca.runtime.together import from_all_ranks, together
from distca.train.config import Config
from distca.train.extra import CheckExtra, Extra
from distca.train.metrics import ABANDONED, Records
from distca.train.run_lock import RunLock
from distca.train.step_folders import newest
from distca.train.torchrun_job import TorchrunJob
from distca.train.trackers import Trackers
from distca.train.weights import Weights

Tell = Callable[[str], None]


@dataclass(frozen=True, eq=False)
class RunFolder:
    """The folder of a run as one of its ranks sees it.

    tell: called with sentences for the user.
    lock: held by the first rank, unless its launcher holds one.
    """

    path: Path
    config: Config
    rank: int
    tell: Tell
    lock: RunLock | None = None

    @classmethod
    def of_ranks(cls, config: Config, context: RankContext, tell: Tell) -> RunFolder:
        """Returns the folder that the first rank names, and locks it; a collective of all ranks."""
        path, lock = Path(from_all_ranks(config.out)[0]), None
        with together(context.world_group):
            if context.rank == 0 and not is_launched():
                lock = RunLock(path)
                TorchrunJob(path).forget_earlier()
        return cls(path, config, context.rank, tell, lock)

    def unlock(self) -> None:
        if self.lock is not None:
            self.lock.release()

    def resume(
        self,
        weights: Weights | None,
        group: dist.ProcessGroup,
        check: CheckExtra,
        restore: Callable[[Extra], int],
    ) -> None:
        """Continues on all ranks from the checkpoint that the first rank has loaded, if any.

        group: all ranks.
        check: raises ValueError for a checkpoint that this run may not go on from.
        restore: called with what the checkpoint has besides weights; returns its step.
        """
        resumes, chosen = self.config.resume, self.config.from_step
        job = TorchrunJob(self.path)
        start: list[Any] = [None]
        with together(group):
            if job.has_begun():  # what it set aside is not to be continued, what it saved is
                resumes, chosen = True, -1
            if weights is not None and resumes:
                resumed = weights.checkpoints.resume(None if chosen < 0 else chosen, check)
                start = [resumed and (resumed.extra, resumed.notes)]
        dist.broadcast_object_list(start, src=0, group=group)
        step, words, notes = -1, f"starting new in {self.path}", []
        if start[0] is not None:
            extra, notes = start[0]
            with together(group):
                step = restore(extra)
            words = f"resumed from step {step} of {self.path}"
        if weights is not None:
            aside = weights.checkpoints.set_aside_after(step)
            notes += [f"{name} is later, and is kept but not used" for name in aside]
        if self.rank == 0:
            job.begin()
        for line in (*notes, words):
            self.tell(line)

    def open_records(self, first_step: int) -> Records | None:
        """Returns where to write records of steps; None on all ranks but the first."""
        if self.rank:
            return None
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self.config.save(self.path / "config.json")
            trackers = Trackers(self.config.log, self.path, self.config.to_json())
            records = Records(self.path, first_step, trackers)
        if count := records.num_abandoned:
            self.tell(f"{count} records of later steps were moved to {self.path / ABANDONED}")
        return records

    @property
    def newest_checkpoint(self) -> str:
        """A clause that says where the last checkpoint is."""
        found = newest(self.path / "checkpoints")
        return f"the last checkpoint is {found}" if found else "there is no checkpoint"
