"""Progress of long work: a bar on a terminal, a line for each step anywhere else."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Update = Callable[[int, str], None]  # the number of steps that are done, and a few words


@contextmanager
def progress(console: Console, title: str, total: int) -> Iterator[Update]:
    """Yields a function that shows how many of ``total`` steps are done."""

    def print_line(done: int, text: str) -> None:
        count = f"{done:{len(str(total))}}/{total}"
        console.print(f"{title} {count}  {text}", soft_wrap=True)

    if not console.is_terminal:
        yield print_line
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[text]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, expand=True) as bar:

        def update(done: int, text: str) -> None:
            if not bar.tasks:  # resumed work does not begin at 0
                bar.add_task(title, total=total, completed=done - 1, text="")
            bar.update(bar.tasks[0].id, completed=done, text=text)

        yield update
