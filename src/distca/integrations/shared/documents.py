"""The documents of a rank, as a trainer tells them."""

from collections.abc import Sequence

from distca.planning.placement import Entry

# Documents of one rank, in order: lengths, documents that continue another one of the same rank
# (whose documents are numbered from 0), or shards of documents on many ranks.
Documents = Sequence[Entry]


def num_tokens(entry: Entry) -> int:
    """Returns how many tokens of a document are on its rank."""
    if isinstance(entry, int):
        return entry
    return int(entry["length"] if "length" in entry else entry["stop"] - entry["start"])


def numbered(ranks: Sequence[Documents]) -> list[list[Entry]]:
    """Returns the documents of all ranks with parents numbered over all of them."""
    numbered: list[list[Entry]] = []
    before = 0
    for documents in ranks:
        numbered.append([_shifted(entry, before) for entry in documents])
        before += len(documents)
    return numbered


def _shifted(entry: Entry, before: int) -> Entry:
    if isinstance(entry, int) or "parent" not in entry:
        return entry
    return {**entry, "parent": entry["parent"] + before}
