"""The documents of all ranks, gathered over the host."""

from dataclasses import dataclass

from distca.planning.placement import Entry


@dataclass(frozen=True)
class BatchHandshake:
    """What one rank tells the others about its next batch."""

    documents: tuple[Entry, ...]  # their lengths, or shards of documents that span ranks
    done: bool = False  # this rank has no batch left, and these documents are a filler
    error: str = ""  # why this rank cannot take part
