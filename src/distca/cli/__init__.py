"""The command line: one file per command, and one place where errors become sentences.

Nothing heavy is imported before a command runs, so that ``distca --help`` answers at once.
"""

import os
import sys
from collections.abc import Sequence
from itertools import pairwise
from shutil import get_terminal_size
from typing import Annotated

import typer

from distca import __version__
from distca.cli.bench import app as bench
from distca.cli.check import CheckCommand
from distca.cli.command import Command, for_typer
from distca.cli.doctor import DoctorCommand
from distca.cli.eval import EvalCommand
from distca.cli.export import ExportCommand
from distca.cli.init import InitCommand
from distca.cli.plan import PlanCommand
from distca.cli.profile import ProfileCommand
from distca.cli.report import ReportCommand
from distca.cli.selftest import SelftestCommand
from distca.cli.serve import ServeCommand
from distca.cli.simulate import SimulateCommand
from distca.cli.train import TrainCommand
from distca.runtime.interrupts import CTRL_C
from distca.runtime.launched import RankFailedError, is_repeated, sentence

WIDE_ENOUGH = 70  # columns for the longest names of options beside their texts
_USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]  # typer gives it no public name


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"distca {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            metavar="",
            callback=_show_version,
            is_eager=True,
            help="Show the version and exit.",
        ),
    ] = False,
) -> None:
    """Core attention disaggregation for long-context training.

    For example: distca plan prolong --ranks 64 --compare
    """


def _run(command: Command | None, version: bool) -> None:
    if command is not None:  # None: a group has shown its help
        command.run()


app = typer.Typer(
    name="distca",
    callback=_root,
    result_callback=_run,
    add_completion=False,
    pretty_exceptions_enable=False,  # a bug shows Python's own traceback
    # Rich's tables of options cut names and texts where these do not fit; plain text wraps.
    rich_markup_mode="rich" if get_terminal_size().columns >= WIDE_ENOUGH else None,
)
for _command in (
    PlanCommand, InitCommand, TrainCommand, ServeCommand, EvalCommand, ExportCommand,
    SimulateCommand, ReportCommand, ProfileCommand, DoctorCommand, SelftestCommand, CheckCommand,
):  # fmt: skip
    app.command(_command.__name__.removesuffix("Command").lower())(for_typer(_command))
app.add_typer(bench, name="bench")


def main(args: Sequence[str] | None = None) -> None:
    """Runs the command line and exits with a status.

    0: success. 1: a rank or a check failed. 2: bad input, reported in one sentence. 130: Ctrl-C.
    """
    arguments = list(sys.argv[1:] if args is None else args)
    if os.environ.get("COLUMNS") == "0":  # a terminal of unknown size; nothing would be shown
        del os.environ["COLUMNS"]
    try:
        _check_empty(arguments)
        status = app(arguments or ["--help"], prog_name="distca", standalone_mode=False)
    except (ValueError, OSError, _USAGE_ERROR) as error:
        if not is_repeated(error):
            typer.echo(f"distca: {_sentence(error)}", err=True)
        status = 2
    except RankFailedError as error:
        if not is_repeated(error):
            typer.echo(f"distca: {sentence(error)}", err=True)
        status = 1
    except (KeyboardInterrupt, typer.Abort):
        status = CTRL_C
    sys.exit(status or 0)


def _check_empty(arguments: Sequence[str]) -> None:
    """Raises ValueError for an empty value, such as that of a variable that is not set.

    An empty path would be the current folder.
    """
    for before, one in pairwise(["", *arguments]):
        has_no_value = one.startswith("--") and one.find("=") == len(one) - 1
        if has_no_value or not one:
            flag = one[:-1] or before
            what = f"the value of {flag}" if flag.startswith("--") else "an argument"
            raise ValueError(f"{what} is empty: give one, or leave it out")


def _sentence(error: Exception) -> str:
    if isinstance(error, _USAGE_ERROR):
        text = getattr(error, "format_message", error.__str__)()
        return f"{' '.join(text.split())} (see --help)"
    return sentence(error)
