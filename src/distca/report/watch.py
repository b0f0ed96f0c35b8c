"""How far something is, for people: a bar on a terminal, a line anywhere else."""

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


class Watch:
    """Called with how many of ``total`` are done, and a few words."""

    def __init__(self, console: Console, title: str, total: int) -> None:
        self._console, self._title, self._total = console, title, total
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                TextColumn("{task.fields[said]}"),
                TimeRemainingColumn(),
                console=console,
                expand=True,
            )

    def __call__(self, done: int, said: str) -> None:
        if self._bar is not None:
            if self._task is None:  # what goes on does not begin at 0
                self._task = self._bar.add_task(
                    self._title, total=self._total, completed=done - 1, said=""
                )
            self._bar.update(self._task, completed=done, said=said)
            return
        count = f"{done:{len(str(self._total))}}/{self._total}"
        self._console.print(f"{self._title} {count}  {said}", soft_wrap=True)

    def __enter__(self) -> Watch:
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
