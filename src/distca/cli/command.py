"""A command of the command line is a frozen dataclass.

Its fields are the options and arguments, with their types, defaults, metavars and help texts; its
docstring is the command's help; and ``run`` does the work. Typer builds it from the command line,
and ``distca.cli`` runs what was built. ``distca.schema`` reads the same fields from TOML.
"""

# Commands import numpy and torch inside their functions: `distca --help` must not wait for them.
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import MISSING, field, fields
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, Protocol, get_type_hints

import typer
from rich.console import Console
from typer import Argument, Option

from distca.report.progress import Update, progress
from distca.runtime.launched import STOPPED_EARLY, is_launched, mark_repeated
from distca.runtime.rank_watch import Stop
from distca.runtime.shared_gpu import SharedGpu, share_gpu

OUTPUT = "Output"
PICTURES = (".png", ".svg", ".pdf")
LINE_S = 10.0  # between two lines on the progress, where there is no terminal


class Command(Protocol):
    def run(self) -> None: ...


def option(
    metavar: str, text: str, default: Any = None, *flags: str, panel: str | None = None
) -> Any:
    """Declares an option as a field of a command.

    metavar: what stands for the value in the help; empty for a switch.
    flags: by default the name of the field, with dashes.
    panel: the part of the help that it is listed in.
    """
    info = Option(*flags, metavar=metavar, help=text, rich_help_panel=panel)
    return field(default=default, metadata={"typer": info, "flags": flags})


def argument(metavar: str, text: str, default: Any = MISSING, **options: Any) -> Any:
    """Declares a positional argument as a field of a command."""
    info = Argument(metavar=metavar, help=text, **options)
    return field(default=default, metadata={"typer": info})


def json_switch() -> Any:
    """Declares ``--json``, which all commands have."""
    return option("", "Print one JSON object, for scripts.", False, "--json", panel=OUTPUT)


def share_switch(panel: str | None = None) -> Any:
    """Declares ``--share-gpu``, for commands that start ranks."""
    return option(
        "", "Let all ranks share one GPU: a rehearsal.", False, "--share-gpu", panel=panel
    )


@contextmanager
def sharing(
    wanted: bool, num_ranks: int, logs: Path, *, in_turns: bool = False
) -> Iterator[SharedGpu | None]:
    """Prepares a GPU for ranks that share it, if that is wanted."""
    if not wanted:
        if in_turns:
            raise ValueError("--in-turns is about ranks that share a GPU: give --share-gpu too")
        yield None
        return
    with share_gpu(num_ranks, logs / "mps", side_by_side=not in_turns) as gpu:
        yield gpu


def check_sharing(wanted: bool) -> None:
    """Raises ValueError in a rank of torchrun that is asked to prepare the GPU for all ranks."""
    if wanted and not is_launched():
        error = ValueError(
            "--share-gpu under torchrun: leave out torchrun and give --ranks, or leave out"
            " --share-gpu and set DISTCA_SHARE_GPU=0, after starting MPS"
        )
        mark_repeated(error, os.environ["RANK"] != "0")
        raise error


def check_output(flag: str, path: Path | None, *inputs: Path | str | None) -> None:
    """Raises ValueError before the work if a file cannot be written, or is one that is read."""
    if path is None:
        return
    if not path.parent.is_dir():
        raise ValueError(f"{path} cannot be written: there is no folder {path.parent}; create it")
    if flag == "--plot" and path.suffix not in PICTURES:
        raise ValueError(f"--plot {path}: give a file that ends in {', '.join(PICTURES)}")
    for one in (one for one in inputs if one is not None):
        if path.exists() and Path(one).exists() and path.samefile(one):
            raise ValueError(f"{flag} {path} is the file that is read: give another one")


def check_one_process(command: str) -> None:
    """Raises ValueError in a rank of torchrun, for a command that uses one process."""
    if "RANK" in os.environ:
        error = ValueError(f"distca {command} runs in one process: start it without torchrun")
        mark_repeated(error, os.environ["RANK"] != "0")
        raise error


def for_typer(command: type[Command]) -> type[Command]:
    """Returns the command with the signature from which Typer makes its options and arguments."""
    hints = get_type_hints(command)
    command.__signature__ = Signature(  # type: ignore[attr-defined]
        [
            Parameter(
                one.name,
                Parameter.KEYWORD_ONLY,
                default=Parameter.empty if one.default is MISSING else one.default,
                annotation=Annotated[hints[one.name], one.metadata["typer"]],
            )
            for one in fields(command)  # type: ignore[arg-type]
        ]
    )
    return command


def rank_command(name: str, command: Command) -> list[str]:
    """Returns the command line that a launcher starts as each rank: the same command again.

    name: one word, or two for a command of a group.
    """
    options, arguments = [], []
    for one in fields(command):  # type: ignore[arg-type]
        value, flags = getattr(command, one.name), one.metadata.get("flags")
        if value == one.default:
            continue
        if flags is None:
            arguments.append(str(value))
            continue
        flag = flags[0] if flags else f"--{one.name.replace('_', '-')}"
        if isinstance(value, bool):
            on, _, off = flag.partition("/")
            options.append(on if value else off)
        else:
            values = value if isinstance(value, list) else [value]
            options += [f"{flag}={each}" for each in values]
    # -P: nothing in the working directory is imported by accident.
    start = [sys.executable, "-P", "-m", "distca", *name.split(), *options]
    return [*start, "--", *arguments] if arguments else start


def console(quiet: bool = False) -> Console:
    """Returns a console that prints text as it is, on standard output."""
    return Console(highlight=False, markup=False, quiet=quiet)


def showing_progress(
    title: str, total: int, *, quiet: bool, start: str = ""
) -> AbstractContextManager[Update]:
    """Shows progress on standard error, since results may be piped to a file."""
    errors = Console(stderr=True, highlight=False, markup=False, quiet=quiet)
    return progress(errors, title, total, start=start, transient=True, every_s=LINE_S)


def exit_if_stopped(stop: Stop | None, *, continues: bool = False) -> None:
    """Exits after a signal: with 130 after a Ctrl-C, so that it stops a script too.

    continues: whether the same command goes on from what it has saved. Then SIGTERM, with which
        schedulers end a job, counts as success.
    """
    if stop is None:
        return
    if stop.early:
        typer.echo(STOPPED_EARLY if continues else "stopped: there is no result", err=True)
    if stop.signal == signal.SIGINT or (stop.early and not continues):
        raise typer.Exit(128 + stop.signal)
