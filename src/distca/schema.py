"""Reads frozen dataclasses from TOML files and from ``--set a.b=c``.

A field whose type is a dataclass is a section. Names and types are checked, and each mistake is
reported in one sentence that names the value, the rule and the way out. A field that is declared by
``key`` has its meaning and its limits beside its default: ``keys`` lists them for documentation,
and ``check_limits`` compares the limits with the values.
"""

import difflib
import math
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from numbers import Real
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

Record = TypeVar("Record")
Entry = TypeVar("Entry")
Value = TypeVar("Value")
_MEANING, _LIMITS = "meaning", "limits"
_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


@dataclass(frozen=True)
class Limits:
    """What a number may be: from ``least`` to ``most``, and less than ``below``."""

    least: float = -math.inf
    most: float = math.inf
    below: float = math.inf

    def rule(self, value: float) -> str:
        """Returns the limit that a value is beyond, in words; nothing if it is within all."""
        if not value >= self.least:  # NaN too
            return f"at least {self.least}"
        if value > self.most:
            return f"at most {self.most}"
        return f"below {self.below}" if value >= self.below else ""


@dataclass(frozen=True)
class Key:
    """A key of a record, with its value there and what the value means."""

    section: str  # empty for keys outside of sections
    name: str
    kind: Any  # its type
    value: Any
    meaning: str
    limits: Limits | None  # of a number, or of each number of a list

    @property
    def path(self) -> str:
        return f"{self.section}.{self.name}" if self.section else self.name


def key(default: Value, text: str, limits: Limits | None = None) -> Value:
    """Declares a field with its default, its meaning and, for numbers, its limits."""
    return field(default=default, metadata=meaning(text) | {_LIMITS: limits})


def meaning(text: str) -> dict[str, Any]:
    """Returns the metadata of a field that has this meaning."""
    return {_MEANING: text}


def keys(record: Any, section: str = "") -> Iterator[Key]:
    """Yields the keys of a dataclass instance: those outside of sections first."""
    types = get_type_hints(type(record))
    sections = []
    for one in fields(record):
        value = getattr(record, one.name)
        if is_dataclass(value):
            sections.append(one.name)
        else:
            about = one.metadata.get(_MEANING, ""), one.metadata.get(_LIMITS)
            yield Key(section, one.name, types[one.name], value, *about)
    for name in sections:
        yield from keys(getattr(record, name), name)


def check_limits(record: Any) -> None:
    """Raises ValueError for a number that is beyond the limits of its key."""
    for one in keys(record):
        several = isinstance(one.value, tuple)
        for number in one.value if several else (one.value,):
            if one.limits is not None and (rule := one.limits.rule(number)):
                shown, which = (list(one.value), "each") if several else (number, "it")
                raise ValueError(f"{one.path} = {shown}: {which} must be {rule}")


def read_toml(path: Path | str, kind: type | None = None) -> dict[str, Any]:
    """Returns the values of a TOML file, after a ``check`` against a dataclass if one is given."""
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from None
    if kind is not None:
        try:
            check(kind, values)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    return values


def assign(values: dict[str, Any], setting: str) -> None:
    """Writes ``a.b=c`` into nested dictionaries, with c read as TOML or, failing that, as text."""
    name, equals, text = setting.partition("=")
    *sections, last = name.strip().split(".")
    if not equals or not all([*sections, last]):
        raise ValueError(f"--set {setting}: write it as section.name=value")
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise ValueError(f"--set {setting}: {section} is a value, not a section")
    try:
        values[last] = tomllib.loads(f"x = {text}")["x"]
    except (ValueError, RecursionError):
        values[last] = text.strip()


def build(kind: type[Record], values: Any, where: str = "") -> Record:
    """Returns a dataclass with ``values`` by name and defaults for the rest.

    where: the section that the values are from, for error messages.
    """
    checked = check(kind, values, where)
    for one in fields(kind):  # type: ignore[arg-type]
        if one.name not in checked and one.default is one.default_factory is MISSING:
            raise ValueError(f"{where}.{one.name} is missing".removeprefix("."))
    return kind(**checked)


def check(kind: type, values: Any, where: str = "") -> dict[str, Any]:
    """Returns ``values`` with the types of the dataclass's fields; see ``build``."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{where} = {values!r}: it must be a section with names and values")
    types = get_type_hints(kind)
    checked = {}
    for name, value in values.items():
        path = f"{where}.{name}" if where else name
        check_known(name, types, path)
        checked[name] = _convert(types[name], value, path)
    return checked


def check_known(name: str, known: Iterable[str], path: str) -> None:
    known = list(known)
    if name not in known:
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(known)}"
        raise ValueError(f"{path} is unknown: {hint}")


def is_number(value: object, least: float, most: float) -> bool:
    """Returns whether a value is a number in these limits; truth values and NaN are none."""
    number: Any = value  # a Real of numbers.abc cannot be compared in the eyes of mypy
    return isinstance(value, Real) and not isinstance(value, bool) and least <= number <= most


def shown(value: object) -> str:
    """Returns a value for an error message, of which a long one has only the beginning."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no integers of more than 4,300 digits
        return f"a value of type {type(value).__name__} with thousands of digits"
    return text if len(text) <= 60 else f"{text[:57]}..."


def choose(table: Mapping[str, Entry], name: str, what: str, otherwise: str = "") -> Entry:
    """Returns an entry of a table; the error lists all names, and what to do ``otherwise``."""
    if not isinstance(name, str) or name not in table:
        known = ", ".join(table)
        raise ValueError(f"{what} {shown(name)} is unknown: choose one of {known}{otherwise}")
    return table[name]


def _convert(kind: Any, value: Any, path: str) -> Any:
    """Returns ``value`` as ``kind``.

    One value may stand for a list of one, and for text a number or a list: 64 is "64", and
    [64, 128] is "64,128".
    """
    if is_dataclass(kind):
        return build(kind, value, path)  # type: ignore[arg-type]
    origin, inner = get_origin(kind), get_args(kind)
    if NoneType in inner:
        return None if value is None else _convert(inner[0], value, path)
    if origin in (tuple, list):
        items = value if isinstance(value, list | tuple) else [value]
        if origin is tuple and inner[-1] is not Ellipsis and len(inner) != len(items):
            raise ValueError(f"{path} has {len(items)} values: it must have {len(inner)}")
        return origin(_convert(inner[0], item, path) for item in items)
    if origin is not None:  # a mapping, whose entries are checked by the code that uses it
        if not isinstance(value, Mapping):
            raise ValueError(f"{path} = {value!r}: it must be a section with names and values")
        return value
    if kind is str and isinstance(value, list):
        return ",".join(_convert(str, item, path) for item in value)
    is_bool = isinstance(value, bool)
    if kind in (float, str) and isinstance(value, int | float) and not is_bool:
        try:
            return kind(value)
        except OverflowError:
            raise ValueError(f"{path} = {value}: it is too large for a number") from None
    if not isinstance(value, kind) or is_bool != (kind is bool):
        raise ValueError(f"{path} = {value!r}: it must be {_WORDS[kind]}")
    return value
