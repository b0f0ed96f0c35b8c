"""Checks that run after their messages were sent."""

from __future__ import annotations

import subprocess
import sys
import time
from threading import Event, Timer

import pytest

from distca.dispatch.transports.late_checks import MAX_CHECKS, LateChecks


def test_the_first_failure_is_raised_at_the_next_message_and_later_checks_do_not_run() -> None:
    called, ran = Event(), []
    checks = LateChecks(on_failure=called.set)

    def fail() -> None:
        raise ValueError("the ranks disagree")

    checks.add(lambda: ran.append("first"))
    checks.raise_failure()
    checks.add(fail)
    checks.add(lambda: ran.append("later"))
    assert called.wait(5)
    for _ in range(2):  # every message after it
        with pytest.raises(ValueError, match="the ranks disagree"):
            checks.raise_failure()
    assert ran == ["first"]


def test_only_so_many_are_under_way() -> None:
    answered = Event()
    checks = LateChecks(on_failure=lambda: None)
    for _ in range(MAX_CHECKS + 1):
        checks.add(lambda: answered.wait(10) or None)
    Timer(0.3, answered.set).start()
    began = time.monotonic()
    checks.raise_failure()
    assert 0.1 < time.monotonic() - began < 5


def test_a_process_with_a_failure_that_nobody_has_seen_does_not_end_in_success() -> None:
    script = (
        "from distca.dispatch.transports.late_checks import LateChecks\n"
        "checks = LateChecks(on_failure=lambda: None)\n"
        "def fail(): raise ValueError('the ranks disagree')\n"
        "checks.add(fail)\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 1
    assert "the ranks disagree" in ran.stderr
