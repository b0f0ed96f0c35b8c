"""Commands as dataclasses: a rank is started with the command line of its launcher's command."""

from collections.abc import Iterator
from pathlib import Path
from signal import SIGINT, SIGTERM
from typing import Any

import pytest
import typer

from distca.cli import app, main
from distca.cli.command import Command, exit_if_stopped, for_typer, rank_command
from distca.cli.profile import ProfileCommand
from distca.cli.selftest import SelftestCommand
from distca.cli.train import TrainCommand
from distca.runtime.rank_watch import Stop

COMMANDS: list[Command] = [
    TrainCommand(),
    TrainCommand(config=Path("-x.toml"), settings=["a.b=[1, 2]", "c=d e"], resume=False, trace=0),
    TrainCommand(
        settings=["x=1"], ranks=2, out=Path("-o"), resume=True, compare=True, as_json=True
    ),
    ProfileCommand(model="150m", backend="-b", quick=True),
    SelftestCommand(out=Path("a b"), as_json=True),
]


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_the_command_of_a_rank_is_that_of_its_launcher(command: Command) -> None:
    line = rank_command("name", command)
    app = typer.Typer()
    app.command()(for_typer(type(command)))
    assert app(line[line.index("name") + 1 :], standalone_mode=False) == command


def commands(group: Any, name: str) -> Iterator[tuple[str, str]]:
    yield name, group.help
    for title, command in getattr(group, "commands", {}).items():
        yield from commands(command, f"{name} {title}")


def test_every_help_has_an_example() -> None:
    found = dict(commands(typer.main.get_command(app), "distca"))
    assert {"distca", "distca train", "distca bench replay"} <= found.keys()
    without = [name for name, text in found.items() if f"For example: {name}" not in text]
    assert without == []


@pytest.mark.parametrize(
    ("stop", "continues", "status", "words"),
    [
        (Stop(SIGINT, early=True), True, 130, "there was nothing new to save"),
        (Stop(SIGTERM, early=True), True, None, "there was nothing new to save"),
        (Stop(SIGTERM, early=False), True, None, ""),
        (Stop(SIGINT, early=True), False, 130, "stopped: there is no result"),
        (Stop(SIGTERM, early=True), False, 143, "stopped: there is no result"),
        (Stop(SIGINT, early=False), False, 130, ""),
    ],
)
def test_only_what_can_go_on_succeeds_after_a_signal(
    stop: Stop, continues: bool, status: int | None, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        exit_if_stopped(stop, continues=continues)
        found = None
    except typer.Exit as ended:
        found = ended.exit_code
    assert found == status
    err = capsys.readouterr().err
    assert words in err
    assert bool(words) == bool(err)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "--out", ""], "the value of --out is empty: give one, or leave it out"),
        (["plan", "pretrain", "--out="], "the value of --out is empty: give one, or leave it out"),
        (["report", ""], "an argument is empty: give one, or leave it out"),
    ],
)
def test_an_empty_value_is_refused(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert capsys.readouterr().err == f"distca: {words}\n"
