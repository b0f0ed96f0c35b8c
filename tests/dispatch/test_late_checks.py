"""Messages that are compared after they were sent."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Condition, Event, Timer

import pytest

from distca.dispatch.agreement import DisagreementError, Handshake
from distca.dispatch.announcements import Announcement, Announcements
from distca.dispatch.transports.base import Records
from distca.dispatch.transports.late_checks import MAX_CHECKS, LateChecks

FLOAT, HALF = Handshake(dtype="float32").record, Handshake(dtype="float16").record


class FakePeers:
    """Another rank announces what ``other`` makes of this rank's records, when it comes."""

    def __init__(self, other: Callable[[str], str] = str) -> None:
        self.other, self.has_come = other, Event()
        self.has_come.set()
        self.announcements = Announcements(Condition())
        self.texts: list[str] = []

    def note(self, record: str) -> None:
        self.texts.append(record)
        self.announcements.note(record)

    def take_noted(self) -> list[Announcement]:
        self.announcements.take_unsent()
        return self.announcements.take_noted()

    def wait(self, announcement: Announcement, timeout_s: float) -> Records:
        if not self.has_come.wait(timeout_s):
            raise TimeoutError
        for index in announcement.indices:
            if (theirs := self.other(mine := self.texts[index])) != mine:
                announcement.answer([mine, theirs])
        announcement.answer()
        return announcement.result()


def test_the_first_difference_is_raised_at_every_message_after_it() -> None:
    called = Event()
    checks = LateChecks(FakePeers(lambda record: FLOAT), on_failure=called.set)  # type: ignore[arg-type]
    checks.note(FLOAT, 1)
    checks.raise_failure()
    checks.note(HALF, 1)
    checks.note(FLOAT, 1)
    assert called.wait(5)
    for _ in range(2):
        with pytest.raises(DisagreementError, match="float16 on rank 0 but float32 on rank 1"):
            checks.raise_failure()


def test_equal_messages_raise_nothing_and_the_thread_runs_again_after_a_pause() -> None:
    peers = FakePeers()
    checks = LateChecks(peers, on_failure=lambda: None)  # type: ignore[arg-type]
    for record in (FLOAT, HALF):
        checks.note(record, 1)
        until = time.monotonic() + 5
        while checks._is_running and time.monotonic() < until:
            time.sleep(0.01)
        assert not checks._is_running
        checks.raise_failure()
    assert not peers.announcements.unsent


@pytest.mark.alone
def test_only_so_many_are_under_way() -> None:
    peers = FakePeers()
    peers.has_come.clear()
    checks = LateChecks(peers, on_failure=lambda: None)  # type: ignore[arg-type]
    for _ in range(MAX_CHECKS + 1):
        checks.note(FLOAT, 30)
    Timer(0.3, peers.has_come.set).start()
    began = time.monotonic()
    checks.raise_failure()
    assert 0.1 < time.monotonic() - began < 5


def test_a_process_with_a_failure_that_nobody_has_seen_does_not_end_in_success() -> None:
    script = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
        "from dispatch.test_late_checks import FLOAT, HALF, FakePeers, LateChecks\n"
        "LateChecks(FakePeers(lambda _: HALF), on_failure=lambda: None).note(FLOAT, 1)\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 1
    assert "the ranks disagree on the dtype" in ran.stderr
