"""The folders of checkpoints: which are complete, and which may be deleted.

    folder/step-00000120/__0_0.distcp ...   shards of tensors, one file from each rank
    folder/step-00000120/extra.json         the trainer's state: step, state of the loader, ...
    folder/step-00000120/.metadata          written after them: without it they are incomplete
    folder/step-00000120/SHA256SUMS         digests of all of these files (``train.digests``)
    folder/step-00000160.aside/             later than a step that a run has gone back to

A run that is killed at any moment keeps its last complete checkpoint: a checkpoint is deleted only
when a newer one is complete, and its ``.metadata`` is deleted first. The newest is the one of the
highest step, since a copy of the folder may have any times. So a run that goes back to an earlier
step sets the later ones aside, where they are neither loaded nor deleted.
"""

import os
import re
import shutil
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from distca.runtime.disk import check_space, check_writable, is_full, no_space

COMPLETE, EXTRA = ".metadata", "extra.json"
_REPLACED, _ASIDE = ".replaced", ".aside"
_OURS = re.compile(rf"step-(\d{{8,}})({re.escape(_REPLACED)})?")


class DamagedCheckpointError(ValueError):
    """A checkpoint cannot be read; an earlier one may be."""


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
        self.set_aside_after(step_of(path))
        self.tidy()
        if path.exists():  # it is complete, and stays valid until the new one is complete
            replaced = path.with_name(path.name + _REPLACED)
            remove(replaced)
            path.rename(replaced)
        path.mkdir()
        with (path / EXTRA).open("w") as file:
            file.write(extra)
            file.flush()
            os.fsync(file.fileno())

    def tidy(self) -> None:
        """Deletes incomplete checkpoints, and all complete ones but the newest."""
        kept = complete(self.folder)[: self.keep]
        for path in _ours(self.folder):
            if path not in kept:
                remove(path)

    def incomplete(self) -> list[Path]:
        return [path for path in _ours(self.folder) if not (path / COMPLETE).is_file()]

    def set_aside_after(self, step: int) -> list[str]:
        """Renames complete checkpoints of later steps; returns their new names."""
        later = [path for path in complete(self.folder) if step_of(path) > step]
        return [path.rename(_free_name(path)).name for path in reversed(later)]


def newest(folder: Path) -> Path | None:
    """Returns the newest complete checkpoint of a run, or None."""
    return next(iter(complete(folder)), None)


def complete(folder: Path) -> list[Path]:
    """Returns complete checkpoints, the highest step first, and one that is replaced last."""
    found = [path for path in _ours(folder) if (path / COMPLETE).is_file()]
    return sorted(found, key=lambda path: (step_of(path), path.suffix != _REPLACED), reverse=True)


def step_of(path: Path) -> int:
    """Returns the step of a checkpoint's folder; -1 for any other."""
    match = _OURS.fullmatch(path.name)
    return int(match[1]) if match else -1


def find(folder: Path, step: int) -> Path:
    """Returns the complete checkpoint of a step. Raises ValueError if there is none."""
    found = complete(folder)
    for path in found:
        if step_of(path) == step:
            return path
    steps = sorted({step_of(path) for path in found})
    raise ValueError(
        f"{folder} has no complete checkpoint of step {step}:"
        f" {f'choose one of {steps}' if steps else 'it has none at all'}"
    )


def remove(path: Path) -> None:
    """Deletes a checkpoint; of a link, the link alone."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    if (path / COMPLETE).is_file():
        (path / COMPLETE).unlink()
    shutil.rmtree(path)


def check_folder(folder: Path, num_bytes: int) -> None:
    """Raises ValueError if a checkpoint of some bytes could not be saved to a folder."""
    if not folder.is_dir() and (folder.exists() or folder.is_symlink()):
        raise ValueError(f"{folder} is not a folder: move it away, or use another one with --out")
    check_space(folder, "a checkpoint", num_bytes)
    try:
        check_writable(folder)
    except OSError as error:
        why = f"{folder} cannot be written ({error.strerror}): use a folder that can be written"
        raise ValueError(no_space(folder) if is_full(error) else why) from None


def _ours(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if step_of(path) >= 0] if folder.is_dir() else []


def _free_name(path: Path) -> Path:
    """Returns step-00000160.aside, or with a number if that exists."""
    for number in count(1):
        new = path.with_name(path.name + _ASIDE + (f"-{number}" if number > 1 else ""))
        if not new.exists():
            return new
    raise AssertionError
