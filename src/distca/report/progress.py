"""Progress of long work: a bar on a terminal, lines anywhere else, both with the time that is left.

The rate is that of all steps so far: some of them take longer than any fixed period.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

Update = Callable[[int, str], None]  # the number of steps that are done, and a few words
_LEAST_BAR, _MOST_TIME = 6, len("100:00:00")  # characters


@contextmanager
def progress(
    console: Console,
    title: str,
    total: int,
    *,
    start: str = "",
    transient: bool = False,
    every_s: float = 0.0,
) -> Iterator[Update]:
    """Yields a function that shows how many of ``total`` steps are done.

    start: what is being done before the first step.
    transient: whether the bar disappears at the end.
    every_s: seconds between two lines, and before the first, where there is no terminal.
    """
    lines = _lines(console, title, total, every_s)
    bar = _bar(console, title, total, start, transient)
    with bar if console.is_terminal else lines as update:
        yield update


@contextmanager
def _bar(console: Console, title: str, total: int, start: str, transient: bool) -> Iterator[Update]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None, table_column=Column(ratio=1)),  # takes what the others leave
        MofNCompleteColumn(),
        TextColumn("{task.fields[text]}"),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns,
        console=console,
        expand=True,
        speed_estimate_period=math.inf,
        transient=transient,
    ) as bar:
        task = bar.add_task(title, total=total, start=False, text=start)
        fixed = len(f"{title}  {total}/{total}  ") + _LEAST_BAR + _MOST_TIME

        def update(done: int, text: str) -> None:
            shown = Text(text)  # cut here, since rich would cut the time that is left
            shown.truncate(console.width - fixed, overflow="ellipsis")
            bar.start_task(task)  # the first update is where the rate is measured from
            bar.update(task, completed=done, text=shown.plain)

        yield update


@contextmanager
def _lines(console: Console, title: str, total: int, every_s: float) -> Iterator[Update]:
    began, first, shown_at = 0.0, 0, time.monotonic()

    def update(done: int, text: str) -> None:
        nonlocal began, first, shown_at
        now = time.monotonic()
        began, first = (began, first) if began else (now, done)
        if now - shown_at < every_s:
            return
        shown_at = now
        left = ""
        if first < done < total:
            left = f"  {_duration((now - began) / (done - first) * (total - done))} left"
        count = f"{done:{len(str(total))}}/{total}"
        console.print(f"{title} {count}  {text}{left}", soft_wrap=True)

    yield update


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min" if minutes else f"{math.ceil(seconds)} s"
