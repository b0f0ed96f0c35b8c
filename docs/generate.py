"""Writes the files that are generated from the source: references and examples/train.toml."""

import re
import textwrap
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from typer.main import get_command

from distca.cli import app
from distca.train.config import Config
from distca.train.config_text import markdown, toml

ROOT = Path(__file__).parent.parent
WIDTH = 120  # of lines on a page
ABOUT = (
    "Every command has `--help`, which shows what stands here, and `--json` where scripts may need"
    " its result. Exit status: 0 for success, 1 if a rank or a check failed, 2 for a mistake in"
    " what was given, which one sentence explains, 130 after Ctrl-C."
)
SOURCE = "This page is generated from `src/distca/cli/` by `python docs/generate.py`."


def commands_page() -> str:
    """Returns a page with the arguments and options of every command."""
    about = ["# Command line", "", _wrapped(ABOUT), "", SOURCE, ""]
    summary = ["| command | |", "|---|---|"]
    sections = []
    for name, command in _commands(get_command(app), "distca"):
        first = _text(" ".join(command.help.split("\n\n")[0].split()))
        summary.append(f"| [`{name}`](#{name.replace(' ', '-')}) | {first} |")
        sections += _section(command, name)
    return "\n".join([*about, *summary, "", *sections])


def _commands(group: Any, name: str) -> Iterator[tuple[str, Any]]:
    for title, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, f"{name} {title}")
        else:
            yield f"{name} {title}", command


def _section(command: Any, name: str) -> Iterator[str]:
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    options = [one for one in command.params if one.param_type_name == "option"]
    words = [one.metavar if one.required else f"[{one.metavar}]" for one in arguments]
    yield f"## {name}\n"
    yield f"```\n{' '.join([name, '[OPTIONS]', *words])}\n```\n"
    for paragraph in command.help.split("\n\n"):
        yield _wrapped(_text(" ".join(paragraph.split()))) + "\n"
    if arguments:
        yield "| argument | meaning |\n|---|---|"
        for one in arguments:
            default = _default(one)
            yield f"| `{one.metavar}` | {_text(one.help)}{default and f' Default: {default}.'} |"
        yield ""
    for panel, found in groupby(options, lambda one: one.rich_help_panel):
        yield f"| {panel or 'options'} | default | meaning |\n|---|---|---|"
        for one in found:
            yield f"| {_flags(one)} | {_default(one)} | {_text(one.help)} |"
        yield ""


def _wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_on_hyphens=False)


def _flags(one: Any) -> str:
    value = f" {one.metavar}" if one.metavar else ""
    return ", ".join(f"`{flag}{value}`" for flag in [*one.opts, *one.secondary_opts])


def _default(one: Any) -> str:
    if one.default in (None, "", (), []) or one.default is False:
        return ""
    shown = one.opts[0] if one.default is True else one.default
    return f"`{shown}`"


def _text(text: str) -> str:
    """Returns a help text as Markdown: what looks like a command or a file is code."""
    text = text.replace("\\[", "[")  # which Rich would read as markup
    text = text.replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;")
    text = re.sub(r": (distca .*)$", r": `\1`", text)
    return re.sub(r"(?<![`\w])(--[a-z][a-z-]*)", r"`\1`", text) if "`" not in text else text


FILES = {
    ROOT / "docs" / "reference" / "cli.md": commands_page,
    ROOT / "docs" / "reference" / "config.md": markdown,
    ROOT / "examples" / "train.toml": lambda: toml(Config()),
}

if __name__ == "__main__":
    for path, text in FILES.items():
        path.write_text(text())
