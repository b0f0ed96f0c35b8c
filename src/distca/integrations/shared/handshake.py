"""The documents of all ranks, gathered over the host."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from distca.attention.agreement import DisagreementError
from distca.dispatch.transports.base import NOTE_BYTES, Transport
from distca.planning.placement import Entry

_HEAD = 6  # digits that say how many pages a text has
_LONGEST = 10_000  # of a complaint


@dataclass(frozen=True)
class Note:
    """What a rank comes with."""

    documents: tuple[Entry, ...]  # lengths of them, or shards
    done: bool = False  # it has no batch left, and these documents only fill in
    complaint: str = ""  # why it cannot take part


def exchange(transport: Transport, mine: Note) -> list[Note]:
    """Every rank's note. Raises on every rank if one of them complains."""
    text = json.dumps(asdict(mine) | {"complaint": mine.complaint[:_LONGEST]})
    said = [json.loads(text) for text in gather_texts(transport, text.encode())]
    if mine.complaint:
        raise DisagreementError(mine.complaint)
    for rank, note in enumerate(said):
        if note["complaint"]:
            raise DisagreementError(f"rank {rank} cannot take part: {note['complaint']}")
    return [Note(tuple(note["documents"]), note["done"]) for note in said]


def gather_texts(transport: Transport, text: bytes) -> list[bytes]:
    """Texts of any length, page by page, as a transport's notes are short."""
    num_pages = -(-(_HEAD + len(text)) // NOTE_BYTES)
    paged = b"%0*d" % (_HEAD, num_pages) + text
    pages = [transport.gather(_page(paged, 0))]
    for number in range(1, max(int(page[:_HEAD]) for page in pages[0])):
        pages.append(transport.gather(_page(paged, number)))
    return [b"".join(parts)[_HEAD:] for parts in zip(*pages, strict=True)]


def _page(text: bytes, number: int) -> bytes:
    """A space where this rank's text is over but another's goes on."""
    return text[number * NOTE_BYTES : (number + 1) * NOTE_BYTES] or b" "
