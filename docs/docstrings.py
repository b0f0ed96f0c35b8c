"""Turns the docstrings of distca into Markdown for the API reference.

Arguments and fields stand in a docstring as ``name: meaning``, one below the other, with deeper
lines that continue a meaning. In Markdown they become a list.
"""

import re
from typing import Any

import griffe

ITEM = re.compile(r"([a-z_]+(?:, [a-z_]+)*): (.*)")


class DocstringLists(griffe.Extension):
    """An extension of griffe, which reads the docstrings for mkdocstrings."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = with_lists(obj.docstring.value)


def with_lists(text: str) -> str:
    """Returns a docstring whose arguments are list items."""
    lines, in_list = [], False
    for line in text.splitlines():
        if found := ITEM.fullmatch(line):
            if not in_list and lines and lines[-1]:
                lines.append("")
            line, in_list = f"- `{found[1]}`: {found[2]}", True
        elif not line.startswith(" "):
            in_list = False
        lines.append(line)
    return "\n".join(lines)
