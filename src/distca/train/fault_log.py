"""``faults.jsonl`` in the folder of a run: the faults that were delivered, and the recoveries.

A fault is written before it takes effect, so that of a killed rank counts too. A fault in the file
is not delivered again: neither after a restart, nor when the same command resumes the run later. A
run that starts new moves the lines of an earlier one to ``faults.abandoned.jsonl``.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distca.runtime.disk import writing
from distca.runtime.launched import num_restarts
from distca.train.config import Config
from distca.train.faults import Fault
from distca.train.metrics import read
from distca.train.step_folders import newest

NAME, ABANDONED = "faults.jsonl", "faults.abandoned.jsonl"


@dataclass(frozen=True)
class FaultCounts:
    """What became of the faults of a run.

    missing: those that were not delivered.
    """

    planned: int
    missing: tuple[Fault, ...]
    recoveries: int

    @property
    def delivered(self) -> int:
        return self.planned - len(self.missing)


class FaultLog:
    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME

    @classmethod
    def begin(cls, config: Config) -> None:
        """Moves the lines of an earlier run aside, if a run starts new with this config."""
        folder = Path(config.out)
        resumes = config.resume and newest(folder / "checkpoints") is not None
        if resumes or num_restarts() or not (folder / NAME).exists():
            return
        with writing(folder), (folder / ABANDONED).open("a") as file:
            file.write((folder / NAME).read_text())
        (folder / NAME).unlink()

    def delivered(self, fault: Fault, rank: int, step: int, **where: Any) -> None:
        """Writes a fault that takes effect as soon as this returns."""
        self._write({"fault": str(fault), "rank": rank, "step": step, **where})

    def recovered(self, step: int) -> None:
        """Writes that a restarted run has taken a step."""
        self._write({"recovery": num_restarts(), "step": step})

    def missing(self, faults: Sequence[Fault]) -> tuple[Fault, ...]:
        """Returns the faults that were not delivered yet."""
        found = {line.get("fault") for line in self._read()}
        return tuple(fault for fault in faults if str(fault) not in found)

    def counts(self, faults: Sequence[Fault]) -> FaultCounts:
        recoveries = sum("recovery" in line for line in self._read())
        return FaultCounts(len(faults), self.missing(faults), recoveries)

    def _read(self) -> list[dict[str, Any]]:
        return read(self._path) if self._path.exists() else []

    def _write(self, line: dict[str, Any]) -> None:
        """Appends a line, which is on the disk when this returns."""
        text = json.dumps(line | {"time": round(time.time(), 3)}) + "\n"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            with writing(self._path):
                os.write(file, text.encode())  # at once: all ranks write to the same file
                os.fsync(file)
        finally:
            os.close(file)
