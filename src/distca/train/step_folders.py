"""The folders of checkpoints: which of them count, and which may go.

    folder/step-00000120/__0_0.distcp ...   parts of tensors, a file from each rank
    folder/step-00000120/extra.json         what the trainer adds: step, state of the loader, ...
    folder/step-00000120/.metadata          written last: without it the folder counts for nothing

A kill at any moment leaves a complete checkpoint where there was one. Nothing is deleted before
something newer is complete; and ``.metadata`` is deleted first, so what is half deleted does not
count either.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COMPLETE, EXTRA = ".metadata", "extra.json"
_REPLACED = ".replaced"
_OURS = re.compile(rf"step-\d{{8,}}({re.escape(_REPLACED)})?")


@dataclass(frozen=True)
class StepFolders:
    """Those of one run. One process prepares and tidies, while no save is under way."""

    folder: Path
    keep: int

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise ValueError(f"keep = {self.keep}: 1 or more, or there would be nothing to load")

    def of(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def prepare(self, path: Path, extra: str) -> None:
        """An empty folder for a new checkpoint, but for its extra."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.tidy()
        if path.exists():  # and complete, or it were gone now: it counts until the new one does
            aside = path.with_name(path.name + _REPLACED)
            _remove(aside)
            path.rename(aside)
        path.mkdir()
        with (path / EXTRA).open("w") as file:
            file.write(extra)
            file.flush()
            os.fsync(file.fileno())

    def tidy(self) -> None:
        """Deletes what is incomplete, and all but the newest."""
        kept = _complete(self.folder)[: self.keep]
        for path in self.folder.iterdir():
            if _OURS.fullmatch(path.name) and path not in kept:
                _remove(path)


def newest(folder: Path) -> Path | None:
    """The newest complete checkpoint of a run, None if there is none."""
    return next(iter(_complete(folder)), None)


def read_extra(path: Path) -> dict[str, Any]:
    """The ``extra`` of a complete checkpoint."""
    if not (path / COMPLETE).is_file():
        what = "is an incomplete checkpoint" if path.is_dir() else "does not exist"
        latest = newest(path.parent)
        hint = f"the newest complete one there is {latest.name}" if latest else "give another"
        raise ValueError(f"{path} {what}: {hint}")
    try:
        extra = json.loads((path / EXTRA).read_text())
        if not isinstance(extra, dict):
            raise ValueError("not a JSON object")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path / EXTRA} is damaged ({error}): load an earlier checkpoint"
        ) from None
    return extra


def _complete(folder: Path) -> list[Path]:
    """Newest first: as they were completed, since a run may go back to an earlier step."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        if _OURS.fullmatch(path.name) and (path / COMPLETE).is_file():
            found.append(((path / COMPLETE).stat().st_mtime_ns, path.name, path))
    return [path for *_, path in sorted(found, reverse=True)]


def _remove(path: Path) -> None:
    (path / COMPLETE).unlink(missing_ok=True)
    if path.exists():
        shutil.rmtree(path)
