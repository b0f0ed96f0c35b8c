"""Folders of checkpoints that hold something else, or cannot be written."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from distca.train import step_folders
from distca.train.step_folders import COMPLETE, EXTRA, StepFolders, check_folder, complete


def test_links_and_files_make_way_for_checkpoints(tmp_path: Path) -> None:
    folder, kept = tmp_path / "checkpoints", tmp_path / "kept"
    kept.mkdir()
    (kept / COMPLETE).touch()
    folder.mkdir()
    (folder / "step-00000001").symlink_to(kept)
    (folder / "step-00000002").symlink_to(tmp_path / "nowhere")
    (folder / "step-00000003").touch()
    (folder / "step-00000004" / COMPLETE).mkdir(parents=True)
    folders = StepFolders(folder, keep=1)
    assert complete(folder) == [folder / "step-00000001"]
    assert len(folders.incomplete()) == 3
    for step in (2, 3, 4):
        folders.prepare(folders.of(step), "{}")
        assert (folders.of(step) / EXTRA).read_text() == "{}"
        (folders.of(step) / COMPLETE).touch()
    folders.tidy()
    assert [path.name for path in folder.iterdir()] == ["step-00000004"]
    assert (kept / COMPLETE).exists()


@pytest.mark.parametrize("kind", ["file", "link", "pipe"])
def test_what_is_no_folder_is_told(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "checkpoints"
    match kind:
        case "file":
            folder.touch()
        case "link":
            folder.symlink_to(tmp_path / "nowhere")
        case "pipe":
            os.mkfifo(folder)
    with pytest.raises(ValueError, match=r"checkpoints is not a folder: move it away, or"):
        check_folder(folder, 0)


def test_a_folder_that_is_not_there_yet_is_checked_by_the_one_above(tmp_path: Path) -> None:
    check_folder(tmp_path / "run" / "checkpoints", 1 << 20)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            errno.EROFS,
            r"cannot be written \(Read-only file system\): use a folder that can be written",
        ),
        (errno.EDQUOT, "no space left on .*: .* GB are free"),
    ],
)
def test_a_folder_that_cannot_be_written_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, words: str
) -> None:
    def refuse(folder: Path) -> None:
        raise OSError(code, os.strerror(code), str(folder))

    monkeypatch.setattr(step_folders, "check_writable", refuse)
    with pytest.raises(ValueError, match=words):
        check_folder(tmp_path, 0)


def test_a_disk_that_holds_no_checkpoint_is_told(tmp_path: Path) -> None:
    num_bytes = 2 * shutil.disk_usage(tmp_path).total
    words = rf"no space left on {tmp_path}: a checkpoint needs about \S+ GB and \S+ GB are free"
    with pytest.raises(ValueError, match=words):
        check_folder(tmp_path, num_bytes)
