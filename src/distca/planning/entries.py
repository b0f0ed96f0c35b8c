"""The documents of a rank as trainers give them: by their lengths, or by their fields."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from distca.planning.masks import CAUSAL
from distca.planning.prefixes import NO_PARENT
from distca.planning.spans import Ints, Span, as_ints
from distca.schema import shown

Entry = int | Mapping[str, Any]  # the length of a document, or a document or shard by its fields
BELOW = CAUSAL  # of all numbers: what a causal mask sees, and more than any plan can hold


def listed(values: object, where: str, of_what: str) -> list[Any]:
    """Returns the items of a list, an array or any other iterable; else raises ValueError."""
    wrong = isinstance(values, str | bytes | Mapping) or getattr(values, "ndim", 1) == 0
    if wrong or not isinstance(values, Iterable):
        raise ValueError(f"{where} is {shown(values)}: it must be a list of {of_what}")
    return list(values)


def lengths_of(entries: Sequence[Entry]) -> Ints | None:
    """Returns the entries if all are lengths, which then need not be read one by one."""
    integers = set(map(type, entries)) <= {int, np.int32, np.int64}
    if not integers or not entries or min(cast("Sequence[int]", entries)) < 1:
        return None
    try:
        return as_ints(entries)
    except OverflowError:  # whoever reads them one by one names the number
        return None


class Facts(NamedTuple):
    """What all shards of a document say about it."""

    parent: int = NO_PARENT
    prefix: int = 0
    two_way: tuple[Span, ...] = ()

    def __str__(self) -> str:
        spans = [list(span) for span in self.two_way]
        return f"parent {self.parent}, prefix {self.prefix} and two_way {spans}"


def read_entry(entry: Entry, where: str) -> tuple[int | None, int, int, Facts]:
    """Returns the name of a document, None if it is whole, its span, and what is said about it."""
    if not isinstance(entry, Mapping):
        return None, 0, _read_length(entry, where), Facts()
    two_way = _read_spans(entry.get("two_way", ()), f"two_way in {where}")
    fields = {
        key: _read_int(value, f"{key} in {where}")
        for key, value in entry.items()
        if key != "two_way"
    }
    found = Facts(fields.pop("parent", NO_PARENT), fields.pop("prefix", 0), two_way)
    if fields.keys() == {"length"}:
        length = _read_length(fields["length"], where)
        return None, found.prefix, found.prefix + length, found
    if fields.keys() != {"document", "start", "stop"}:
        raise ValueError(
            f"{where} is {shown(dict(entry))}: a shard has document, start and stop, and a document"
            " has length; both may have two_way, and parent and prefix if it continues another one"
        )
    if not 0 <= fields["start"] < fields["stop"]:
        raise ValueError(
            f"{where} spans [{fields['start']}, {fields['stop']}): it needs 0 <= start < stop"
        )
    return fields["document"], fields["start"], fields["stop"], found


def _read_spans(value: object, where: str) -> tuple[Span, ...]:
    spans = []
    for span in value if isinstance(value, list | tuple) else [value]:
        if not isinstance(span, list | tuple) or len(span) != 2:
            raise ValueError(f"{where} is {shown(value)}: it must be a list of spans [start, stop]")
        spans.append((_read_int(span[0], where), _read_int(span[1], where)))
    return tuple(sorted(spans))


def _read_length(value: object, where: str) -> int:
    length = _read_int(value, where)
    if length < 1:
        raise ValueError(f"{where} is a document of {length} tokens: it needs >= 1")
    return length


def _read_int(value: object, where: str) -> int:
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        number = int(value)
        if abs(number) < BELOW:
            return number
    raise ValueError(
        f"{where} is {shown(value)}: it must be a whole number of tokens, fewer than {BELOW}"
    )
