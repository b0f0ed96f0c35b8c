"""The folders of checkpoints: which are complete, and which may be deleted.

    folder/step-00000120/__0_0.distcp ...   shards of tensors, one file from each rank
    folder/step-00000120/extra.json         the trainer's state: step, state of the loader, ...
    folder/step-00000120/.metadata          written last: without it the checkpoint is incomplete

A run that is killed at any moment keeps its last complete checkpoint: a checkpoint is deleted only
when a newer one is complete, and its ``.metadata`` is deleted first.
"""

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
    """The checkpoints of one run. One process calls it, while no save is in progress."""

    folder: Path
    keep: int  # how many complete checkpoints stay, at least 1

    def of(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def prepare(self, path: Path, extra: str) -> None:
        """Creates the folder of a new checkpoint, with its ``extra.json``."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.tidy()
        if path.exists():  # it is complete, and stays valid until the new one is complete
            aside = path.with_name(path.name + _REPLACED)
            _remove(aside)
            path.rename(aside)
        path.mkdir()
        with (path / EXTRA).open("w") as file:
            file.write(extra)
            file.flush()
            os.fsync(file.fileno())

    def tidy(self) -> None:
        """Deletes incomplete checkpoints, and all complete ones but the newest."""
        kept = _complete(self.folder)[: self.keep]
        for path in self.folder.iterdir():
            if _OURS.fullmatch(path.name) and path not in kept:
                _remove(path)


def newest(folder: Path) -> Path | None:
    """Returns the newest complete checkpoint of a run, or None."""
    return next(iter(_complete(folder)), None)


def read_extra(path: Path) -> dict[str, Any]:
    """Returns the ``extra`` of a complete checkpoint."""
    if not (path / COMPLETE).is_file():
        what = "is an incomplete checkpoint" if path.is_dir() else "does not exist"
        latest = newest(path.parent)
        hint = f"the newest complete one is {latest.name}" if latest else "choose another one"
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
    """Returns complete checkpoints, the latest first; a later one may have an earlier step."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        if _OURS.fullmatch(path.name) and (path / COMPLETE).is_file():
            found.append(((path / COMPLETE).stat().st_mtime_ns, path.name, path))
    return [path for *_, path in sorted(found, reverse=True)]


def _remove(path: Path) -> None:
    (path / COMPLETE).unlink(missing_ok=True)
    if path.exists():
        shutil.rmtree(path)
