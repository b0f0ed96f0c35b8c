"""Sentences on full disks: which place, what it needs, and what is free."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import SafetensorError

from distca.runtime.disk import check_space, writing
from distca.runtime.launched import sentence

NO_SPACE = "Error while serializing: I/O error: No space left on device (os error 28)"


def fill() -> None:
    with Path("/dev/full").open("wb", buffering=0) as file:
        file.write(b"x")


def fail_in_rust() -> None:
    raise SafetensorError(NO_SPACE)


def copy() -> None:
    shutil.copyfile(__file__, "/dev/full")


@pytest.mark.parametrize("write", [fill, fail_in_rust, copy])
def test_a_full_disk_is_named(write: Callable[[], None], tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    with (
        pytest.raises(ValueError, match=rf"^no space left on {path}: .* another folder$"),
        writing(path),
    ):
        write()


def test_a_full_disk_is_named_where_python_names_it() -> None:
    error = OSError(errno.EDQUOT, "Disk quota exceeded", "/nowhere/file")
    said = sentence(error)
    assert said.startswith("no space left on /nowhere/file: ")
    assert said.endswith(" GB are free; free space or use another folder")


def test_other_errors_are_named_too_unless_they_have_a_name(tmp_path: Path) -> None:
    with pytest.raises(OSError) as raised, writing(tmp_path):  # noqa: PT011
        raise OSError(errno.EIO, "Input/output error")
    assert sentence(raised.value) == (
        f"cannot open {tmp_path}: input/output error; give a path that can be read or written"
    )
    with pytest.raises(OSError, match="nowhere"), writing(tmp_path):
        Path("nowhere/at/all").read_text()
    with pytest.raises(OSError, match=rf"Input/output error: '{tmp_path}'"), writing(tmp_path):
        raise SafetensorError("I/O error: it went wrong (os error 5)")
    with pytest.raises(SafetensorError), writing(tmp_path):
        raise SafetensorError("another error")


def test_what_does_not_fit_is_refused_before(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    check_space(folder, "the model", 1)
    with pytest.raises(
        ValueError,
        match=rf"^no space left on {folder}: the model needs about 1e\+09 GB and [\d.e+]+ GB are",
    ):
        check_space(folder, "the model", 10**18)
