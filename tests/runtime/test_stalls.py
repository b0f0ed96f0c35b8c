"""Stacks in the log of a rank whose step does not end."""

import time

import pytest

from distca.runtime.stalls import stacks_if_stalled


def _waits_for_a_peer() -> None:
    time.sleep(1.0)


def test_a_step_that_does_not_end_shows_where_it_is(capfd: pytest.CaptureFixture[str]) -> None:
    with stacks_if_stalled(0.1):
        _waits_for_a_peer()
    assert "in _waits_for_a_peer" in capfd.readouterr().err


def test_a_step_that_ends_shows_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with stacks_if_stalled(0.1):
        pass
    time.sleep(0.3)
    assert not capfd.readouterr().err


def test_a_step_that_fails_shows_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="a reason"), stacks_if_stalled(0.1):
        raise ValueError("a reason")
    time.sleep(0.3)
    assert not capfd.readouterr().err
