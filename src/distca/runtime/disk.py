"""Errors of writing, told with the place: Python names a file that it cannot open, but not a file
for whose contents there is no space.
"""

import errno
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile

_GB = 1e9
_SOME_BYTES = 1 << 20
_FULL = {errno.ENOSPC, errno.EDQUOT}
_IN_RUST = re.compile(r"\(os error (\d+)\)")  # in errors of safetensors and tokenizers


@contextmanager
def writing(path: Path | str) -> Iterator[None]:
    """Raises ValueError if the disk is full, and adds the path to other errors without one."""
    try:
        yield
    except Exception as error:
        known = error if isinstance(error, OSError) else _from_rust(error)
        if known is None:
            raise
        if is_full(known):
            raise ValueError(no_space(Path(path))) from error
        if known.filename is None:
            known.filename = str(path)
        raise known from None


def _from_rust(error: Exception) -> OSError | None:
    """Returns an error of a library in Rust as Python has it; None if it is not of the system."""
    found = _IN_RUST.search(str(error))
    return None if found is None else OSError(int(found[1]), os.strerror(int(found[1])))


def is_full(error: OSError) -> bool:
    """Returns whether there is no space left, or none that this user may take."""
    return error.errno in _FULL


def check_space(folder: Path, what: str, num_bytes: int) -> None:
    """Raises ValueError if something does not fit on the disk, before any of it is written."""
    usage = shutil.disk_usage(_existing(folder))
    if usage.total and usage.free < num_bytes:
        needs = f"{what} needs about {_gigabytes(num_bytes, math.ceil)} and "
        raise ValueError(no_space(folder, needs))


def check_writable(folder: Path) -> None:
    """Raises OSError if a MiB cannot be written to a folder, or to the first that exists above."""
    with NamedTemporaryFile(dir=_existing(folder)) as file:
        file.write(bytes(_SOME_BYTES))


def check_appendable(path: Path) -> None:
    """Raises OSError if a file may not become larger, because of a limit on the size of files."""
    with path.open("ab") as file:
        file.write(bytes(_SOME_BYTES))


def check_plain(paths: Iterable[Path]) -> None:
    """Raises ValueError for one that is no file, if it is there.

    A link may lead anywhere, and a pipe waits.
    """
    for path in paths:
        if path.is_symlink() or (path.exists() and not path.is_file()):
            what = "a link" if path.is_symlink() else "no file"
            raise ValueError(f"{path} is {what}: move it away, or use another folder with --out")


def no_space(path: Path, needs: str = "") -> str:
    """Returns the sentence on a full disk.

    needs: what is written and how much space it takes, if that is known.
    """
    free = _gigabytes(shutil.disk_usage(_existing(path)).free, math.floor)
    return f"no space left on {path}: {needs}{free} are free; free space or use another folder"


def _gigabytes(num_bytes: int, rounded: Callable[[float], int]) -> str:
    """Returns three digits, rounded such that what is needed is more than what is free."""
    unit = 10 ** max(len(str(num_bytes)) - 3, 0)
    return f"{rounded(num_bytes / unit) * unit / _GB:.3g} GB"


def _existing(path: Path) -> Path:
    """Returns the path, or the first folder above it that exists."""
    return next(one for one in (path, *path.absolute().parents) if one.exists())
