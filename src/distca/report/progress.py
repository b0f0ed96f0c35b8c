"""Progress of long work: a bar on a terminal, a line for each step anywhere else."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)


class ProgressBar:
    """Shows how many of ``total`` steps are done."""

    def __init__(self, console: Console, title: str, total: int) -> None:
        self._console, self._title, self._total = console, title, total
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                TextColumn("{task.fields[text]}"),
                TimeRemainingColumn(),
                console=console,
                expand=True,
            )

    def update(self, done: int, text: str) -> None:
        """Shows that ``done`` steps are done, with a few words about the last one."""
        if self._bar is not None:
            if self._task is None:  # resumed work does not begin at 0
                self._task = self._bar.add_task(
                    self._title, total=self._total, completed=done - 1, text=""
                )
            self._bar.update(self._task, completed=done, text=text)
            return
        count = f"{done:{len(str(self._total))}}/{self._total}"
        self._console.print(f"{self._title} {count}  {text}", soft_wrap=True)

    def __enter__(self) -> ProgressBar:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
