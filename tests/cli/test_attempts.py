"""What is told when a second signal has ended a run; tests of restarts are in test_restarts.py."""

from pathlib import Path

import pytest

from distca.cli.attempts import tell_what_is_saved
from distca.train.step_folders import COMPLETE


def test_a_second_signal_names_the_last_checkpoint_and_no_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may have come before the ranks could save, or while they ended after that."""

    def said() -> str:
        with pytest.raises(KeyboardInterrupt), tell_what_is_saved(tmp_path):
            raise KeyboardInterrupt
        return capsys.readouterr().err

    assert said() == "ended at once by a second signal: there is no checkpoint\n"
    folder = tmp_path / "checkpoints" / "step-00000003"
    folder.mkdir(parents=True)
    (folder / COMPLETE).touch()
    assert said() == f"ended at once by a second signal: the last checkpoint is {folder}\n"
