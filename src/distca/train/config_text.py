"""The keys of a config as text: as commented TOML, and as a table for the documentation.

Both are made from the keys of the dataclasses in ``train.config``, so they always have all of them.
"""

import json
import re
import textwrap
from collections.abc import Mapping
from itertools import groupby
from typing import Any, get_args, get_origin

from distca.schema import Key, keys
from distca.train.config import Config

_WIDTH = 100
_BARE = re.compile(r"[A-Za-z0-9_-]+")
_KINDS = {bool: "boolean", int: "integer", float: "float", str: "string"}  # as TOML calls them

_ABOUT = (
    "`distca train CONFIG.toml` reads these keys, and `--set section.name=value` overrides them."
    " `distca train --print-config` prints all of them as commented TOML, with the values of a"
    " config; [examples/train.toml](../../examples/train.toml) is what it prints for the defaults."
    " [training.md](../training.md) describes how a run works."
)
_SOURCE = "This page is generated from `src/distca/train/config.py` by `python docs/generate.py`."


def toml(config: Config) -> str:
    """Returns a config as TOML with the meaning of each key; reading it gives the same config."""
    defaults = {key.path: key.value for key in keys(Config())}
    parts = []
    for section, found in groupby(keys(config), lambda key: key.section):
        parts += [f"[{section}]"] if section else []
        for key in found:
            text, default = key.meaning, defaults[key.path]
            if key.value != default:
                text += f" Default: {toml_value(default)}."
            comment = textwrap.wrap(text, _WIDTH, initial_indent="# ", subsequent_indent="# ")
            parts.append("\n".join([*comment, f"{key.name} = {toml_value(key.value)}"]))
    return "\n\n".join(parts) + "\n"


def markdown() -> str:
    """Returns a page with the type, default and meaning of every key."""
    lines = [
        "# Keys of the training config",
        "",
        *textwrap.wrap(_ABOUT, 120, break_on_hyphens=False),
        "",
        _SOURCE,
    ]
    for section, found in groupby(keys(Config()), lambda key: key.section):
        title = f"`[{section}]`" if section else "Outside of sections"
        lines += ["", f"## {title}", ""]
        lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
        lines += [_row(key) for key in found]
    return "\n".join(lines) + "\n"


def _row(key: Key) -> str:
    meaning = key.meaning.replace("|", "\\|").replace("*", "\\*")
    return f"| `{key.name}` | {_kind(key.kind)} | `{toml_value(key.value)}` | {meaning} |"


def _kind(kind: Any) -> str:
    if kind in _KINDS:
        return _KINDS[kind]
    if get_origin(kind) is not tuple:
        return "table"
    inner = get_args(kind)
    count = "" if inner[-1] is Ellipsis else f"{len(inner)} "
    return f"array of {count}{_KINDS[inner[0]]}s"


def toml_value(value: Any) -> str:
    """Returns a value as TOML."""
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            # TOML's strings are those of JSON, which lets one control character through.
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case Mapping():
            entries = (f"{_name(name)} = {toml_value(one)}" for name, one in value.items())
            return f"{{ {', '.join(entries)} }}" if value else "{}"
        case list() | tuple():
            return f"[{', '.join(map(toml_value, value))}]"
        case _:
            return str(value)


def _name(name: str) -> str:
    return name if _BARE.fullmatch(name) else toml_value(name)
