"""Progress: lines with the time that is left, and a bar that knows it at any pace."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from distca.report.progress import progress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def console(is_terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=is_terminal, width=100, color_system=None)


def text_of(screen: Console) -> str:
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue()


def test_lines_say_what_is_left(clock: list[float]) -> None:
    screen = console(is_terminal=False)
    with progress(screen, "step", 200, start="preparing") as update:
        for done, seconds in ((11, 40.0), (12, 40.0), (13, 100.0), (200, 1.0)):
            clock[0] += seconds
            update(done, "loss 1")
    assert text_of(screen).splitlines() == [
        "step  11/200  loss 1",  # resumed, and nothing is known yet
        "step  12/200  loss 1  2 h 5 min left",
        "step  13/200  loss 1  3 h 38 min left",
        "step 200/200  loss 1",
    ]


def test_short_work_prints_no_lines(clock: list[float]) -> None:
    screen = console(is_terminal=False)
    with progress(screen, "simulated", 30, every_s=10.0) as update:
        for done in range(1, 31):
            clock[0] += 1.0
            update(done, "wlb")
    assert text_of(screen).splitlines() == [
        "simulated 10/30  wlb  20 s left",
        "simulated 20/30  wlb  10 s left",
        "simulated 30/30  wlb",
    ]


def test_the_bar_shows_the_time_left_of_slow_steps() -> None:
    now = [1000.0]
    screen = console(is_terminal=True)
    screen.get_time = lambda: now[0]  # type: ignore[method-assign]
    with progress(screen, "step", 10, start="preparing") as update:
        for done in (4, 5, 6):  # resumed at step 3; rich forgets what is older than 30 s by default
            now[0] += 60.0
            update(done, f"loss {done}")
    assert "preparing" in text_of(screen)
    assert "6/10" in text_of(screen)
    assert "0:04:00" in text_of(screen)


def test_long_words_leave_room_for_the_time_left() -> None:
    now = [1000.0]
    screen = console(is_terminal=True)
    screen.width = 80
    screen.get_time = lambda: now[0]  # type: ignore[method-assign]
    with progress(screen, "step", 2000) as update:
        for done in (1, 2):
            now[0] += 60.0
            update(done, "disaggregated  loss 5.5370  123,456 tokens/s  imbalance 1.73x  saved 9")
    shown = text_of(screen)
    assert "2/2000 disaggregated  loss 5.5370  123,456 tokens/s" in shown
    assert "… 33:18:00\n" in shown


def test_a_bar_can_disappear() -> None:
    texts = []
    for transient in (False, True):
        screen = console(is_terminal=True)
        with progress(screen, "policy", 9, transient=transient) as update:
            update(8, "greedy")
        texts.append(text_of(screen))
    erase = "\x1b[1A\x1b[2K"  # the cursor goes up, and the line is cleared
    assert [text.endswith(erase) for text in texts] == [False, True]
