"""A command of the command line is a frozen dataclass.

Its fields are the options and arguments, with their types, defaults, metavars and help texts; its
docstring is the command's help; and ``run`` does the work. Typer reads the dataclass like any other
callable, and ``distca.cli`` runs what it has built. ``distca.schema`` reads the same fields from
TOML.
"""

# Commands import what they need inside their functions: `distca --help` must not wait for numpy.
import signal
import sys
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer
from typer import Option

if TYPE_CHECKING:
    from rich.console import Console

    from distca.runtime.launch import Stop

OUTPUT = "Output"


class Command(Protocol):
    def run(self) -> None: ...


def option(panel: str, metavar: str, text: str, *flags: str) -> Any:
    """Declares an option in a panel of the help; by default its flag is the name of its field.

    metavar: what stands for the value in the help; empty for a switch.
    """
    return Option(*flags, metavar=metavar, help=text, rich_help_panel=panel)


Json = Annotated[bool, option(OUTPUT, "", "Print one JSON object, for scripts.", "--json")]


def console(quiet: bool = False) -> "Console":
    """Returns a console that prints text as it is, on standard output."""
    from rich.console import Console

    return Console(highlight=False, markup=False, quiet=quiet)


def rank_command(arguments: list[str]) -> list[str]:
    """Returns the command that a launcher starts as each rank."""
    # -P: nothing in the working directory is imported by accident.
    return [sys.executable, "-P", "-m", "distca", *arguments]


def exit_if_stopped(stop: "Stop | None") -> None:
    """Exits with 130 after a Ctrl-C, so that it stops a script too. SIGTERM counts as success."""
    if stop is None:
        return
    if stop.early:
        typer.echo("stopped before the first step: there was nothing to save", err=True)
    if stop.signal == signal.SIGINT:
        raise typer.Exit(130)
