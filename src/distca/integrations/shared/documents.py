"""The documents of a rank, as a trainer tells them."""

from collections.abc import Sequence

from distca.planning.entries import Entry
from distca.planning.masks import Mask

TWO_WAY_MASKS = "two_way_masks"  # of a document: those whose layers have its two-way spans

# Documents of one rank, in order: lengths, documents that continue another one of the same rank
# (whose documents are numbered from 0), or shards of documents on many ranks.
Documents = Sequence[Entry]


def num_tokens(entry: Entry) -> int:
    """Returns how many tokens of a document are on its rank."""
    if isinstance(entry, int):
        return entry
    return int(entry["length"] if "length" in entry else entry["stop"] - entry["start"])


def numbered(ranks: Sequence[Documents]) -> list[list[Entry]]:
    """Returns the documents of all ranks as plans take them: parents are numbered over all."""
    numbered: list[list[Entry]] = []
    before = 0
    for documents in ranks:
        numbered.append([_shifted(entry, before) for entry in documents])
        before += len(documents)
    return numbered


def _shifted(entry: Entry, before: int) -> Entry:
    if isinstance(entry, int):
        return entry
    placed = {name: value for name, value in entry.items() if name != TWO_WAY_MASKS}
    return placed | {"parent": entry["parent"] + before} if "parent" in entry else placed


def two_way_spans(entry: Entry, mask: Mask) -> list[tuple[int, int]]:
    """Returns the two-way spans of a document under a mask, as rows of its own tokens.

    A document may list the masks whose layers have them (``two_way_masks``); by default all have.
    """
    if isinstance(entry, int) or str(mask) not in entry.get(TWO_WAY_MASKS, (str(mask),)):
        return []
    first = entry.get("prefix", 0) if "length" in entry else entry["start"]
    return [(start - first, stop - first) for start, stop in entry.get("two_way", ())]


def two_way_masks(ranks: Sequence[Documents]) -> frozenset[str] | None:
    """Returns the masks whose layers have the two-way spans of a batch; None: all of them."""
    named: set[str] = set()
    for entry in (entry for documents in ranks for entry in documents):
        if isinstance(entry, int) or not entry.get("two_way"):
            continue
        if TWO_WAY_MASKS not in entry:
            return None
        named.update(entry[TWO_WAY_MASKS])
    return frozenset(named)
