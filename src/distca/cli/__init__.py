"""The command line: one file per command, and one place where errors become sentences.

Nothing heavy is imported before a command runs, so that ``distca --help`` answers at once.
"""

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from distca import __version__
from distca.cli.bench import app as bench
from distca.cli.check import check
from distca.cli.plan import plan
from distca.cli.profile import profile
from distca.cli.selftest import selftest
from distca.cli.simulate import simulate
from distca.cli.train import train
from distca.runtime.launch import RankFailedError

app = typer.Typer(
    name="distca",
    help="Core attention disaggregation for long-context training.",
    add_completion=False,
    pretty_exceptions_enable=False,  # a bug shows Python's own traceback
)
app.command()(plan)
app.command()(train)
app.command()(simulate)
app.command()(profile)
app.command()(selftest)
app.command()(check)
app.add_typer(bench, name="bench")

_USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]  # typer gives it no public name


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"distca {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    pass  # a callback keeps `plan` a command of its own, and carries --version


def main(args: Sequence[str] | None = None) -> None:
    """Runs the command line and exits: 0; 130 on Ctrl-C; with one sentence 2 for bad input and 1
    for a rank that failed."""
    given = list(sys.argv[1:] if args is None else args)
    try:
        status = app(given or ["--help"], prog_name="distca", standalone_mode=False)
    except (ValueError, OSError, _USAGE_ERROR) as error:
        typer.echo(f"distca: {_sentence(error)}", err=True)
        status = 2
    except RankFailedError as error:
        typer.echo(f"distca: {_sentence(error)}", err=True)
        status = 1
    except (KeyboardInterrupt, typer.Abort):
        status = 130
    sys.exit(status or 0)


def _sentence(error: Exception) -> str:
    """One line: what failed, the values, the rule, the way out."""
    if isinstance(error, OSError) and error.filename:
        reason = (error.strerror or type(error).__name__).lower()
        return f"cannot open {error.filename}: {reason}; give a path that can be read or written"
    if isinstance(error, _USAGE_ERROR):
        said = getattr(error, "format_message", error.__str__)()
        return f"{' '.join(said.split())} (see --help)"
    return " ".join(str(error).split("\n"))
