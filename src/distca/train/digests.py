"""Writes checkpoints, with digests of their files, by which damage is found before loading.

torch.distributed.checkpoint stores none, and torch does not check those of the zip format in which
tensors are saved, so a flipped bit would be loaded as a weight. Each rank digests the files that it
has written, in the background and from the page cache; the first rank writes the digests of all
ranks to ``SHA256SUMS``, which ``sha256sum -c`` reads as well. They do not protect from an attacker.

Serializing takes a core about a second per GB, and digesting one to four, longer than a fast disk
takes to write it. So a rank writes several files, each with a thread of its own.
"""

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.futures import Future

from distca.runtime.disk import check_appendable, check_writable
from distca.train.saved_tensors import describe
from distca.train.step_folders import COMPLETE, EXTRA, DamagedCheckpointError, step_of

SUMS = "SHA256SUMS"
THREADS = 4  # and files, of a rank
ShowBytes = Callable[[int], None]  # takes the bytes that have been handled since the last call


class DigestWriter(FileSystemWriter):
    """Writes a checkpoint, and the digests of its files after everything else.

    before_write: called with the step of the checkpoint before anything is written.
    """

    def __init__(self, path: Path, before_write: Callable[[int], None] | None = None) -> None:
        super().__init__(path, thread_count=THREADS)
        self._before_write = before_write

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        if self._before_write is not None:
            self._before_write(step_of(Path(self.path)))
        written, error = [], RuntimeError("a thread that writes has failed")
        try:
            written = super().write_data(plan, planner).wait()
        except RuntimeError as caught:
            error = caught
        # torch's threads lose their errors, and its zip format does not say why it could not write.
        if len(written) < len(plan.items):
            check_writable(Path(self.path))
            for file in self._files(plan):
                check_appendable(file)  # the checkpoint is lost anyway
            raise error
        # Of a thread that had nothing to write, there is an empty file.
        files = self._files(plan)
        with ThreadPoolExecutor(THREADS) as threads:
            digests = threads.map(_digest, files)
        future: Future[Any] = Future()
        names = (file.name for file in files)
        future.set_result((written, dict(zip(names, digests, strict=True))))
        return future

    def _files(self, plan: SavePlan) -> list[Path]:
        """Returns the files of this rank."""
        return sorted(Path(self.path).glob(f"{plan.storage_data.prefix}*.distcp"))

    def finish(self, metadata: Metadata, results: Any) -> None:
        """results: of each rank, what ``write_data`` has returned there."""
        path = Path(self.path)
        written = chain.from_iterable(of_rank for of_rank, _ in results)
        _write(path / COMPLETE, describe(metadata, written))
        digests = {name: _digest(path / name) for name in (COMPLETE, EXTRA)}
        for _, found in results:
            digests |= found
        lines = (f"{digest}  {name}\n" for name, digest in sorted(digests.items()))
        _write(path / SUMS, "".join(lines))


def check_digests(
    path: Path, rank: int, num_ranks: int, show: ShowBytes = lambda num_bytes: None
) -> None:
    """Raises DamagedCheckpointError if a file has changed; each rank checks its share of the files.

    A checkpoint of an earlier version has no digests, nor has one whose run was killed at its end.

    show: called after each file.
    """
    for name, digest in _saved_digests(path)[rank::num_ranks]:
        _check(path, name, digest)
        show((path / name).stat().st_size)


def check_digest(path: Path, name: str) -> None:
    """Raises DamagedCheckpointError if this file has changed; see ``check_digests``."""
    for saved, digest in _saved_digests(path):
        if saved == name:
            _check(path, name, digest)


def digested_bytes(path: Path) -> int:
    """Returns the size of all files that have a digest and are there."""
    files = (path / name for name, _ in _saved_digests(path))
    return sum(file.stat().st_size for file in files if file.is_file())


def _saved_digests(path: Path) -> list[tuple[str, str]]:
    """Returns names and digests. Raises DamagedCheckpointError if a file has none."""
    if not (path / SUMS).is_file():
        return []
    lines = (path / SUMS).read_text(errors="replace").splitlines()
    found = [(name, digest) for digest, _, name in (line.partition("  ") for line in lines)]
    tensors = (file.name for file in path.glob("*.distcp"))
    if missing := {COMPLETE, EXTRA, *tensors} - {name for name, _ in found}:
        raise DamagedCheckpointError(
            f"{path / SUMS} is damaged (it has no digest of {min(missing)}): load an earlier"
            " checkpoint"
        )
    return found


def _check(path: Path, name: str, digest: str) -> None:
    try:
        # Not of a pipe, which would be read without end.
        changed = not (path / name).is_file() or _digest(path / name) != digest
    except (OSError, ValueError):  # it is gone, or this line is damaged
        changed = True
    if changed:
        raise DamagedCheckpointError(
            f"{path / name} is damaged (its digest is not that in {SUMS}): load an earlier"
            " checkpoint"
        )


def _write(file: Path, text: str) -> None:
    """Writes a file that is there as a whole or not at all."""
    new = file.with_name(f"{file.name}.new")
    with new.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    new.rename(file)


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
