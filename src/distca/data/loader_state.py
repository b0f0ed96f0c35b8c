"""The state of a loader, as it is saved: where in its sources the next batch begins."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from distca import schema

_BELOW = 2**63  # of all counts


class DamagedStateError(ValueError):
    """What was saved is not the state of any loader."""


@dataclass
class Counts:
    """Counts of what one source has delivered so far."""

    epochs: int  # completed
    cursor: int  # documents drawn in this epoch
    documents: int  # drawn and kept
    tokens: int  # delivered in batches
    split: int  # kept documents that are longer than the context
    dropped: int  # longer than the context, with overlong = "drop"
    empty: int  # documents without tokens

    @classmethod
    def zero(cls) -> "Counts":
        return cls(**{one.name: 0 for one in fields(cls)})


@dataclass(frozen=True)
class LoaderState:
    """A few numbers, no tokens; each list has one entry for each source.

    rest: of the document or tree that goes on in the next batch: its source, its index, its first
        token in that batch, and how many tokens are left.
    """

    seed: int
    held_out: float
    weights: list[int]
    documents: list[int]  # in each source
    data: list[Mapping[str, Any]]  # fingerprints
    sources: list[Counts]
    rest: tuple[int, int, int, int] | None = None

    @classmethod
    def read(cls, values: Any) -> "LoaderState":
        """Reads what a loader has saved. Raises DamagedStateError for anything else."""
        try:
            state = schema.build(cls, values, "loader")
        except ValueError as error:
            raise DamagedStateError(str(error)) from None
        for name in ("weights", "data", "sources"):
            if (number := len(getattr(state, name))) != (right := len(state.documents)):
                raise DamagedStateError(f"loader.{name} has {number} values for {right} sources")
        if not all(state.data):
            raise DamagedStateError("loader.data has a source without a fingerprint")
        for counts, size in zip(state.sources, state.documents, strict=True):
            for name, value in asdict(counts).items():
                below = size if name == "cursor" else _BELOW
                if not 0 <= value < below:
                    raise DamagedStateError(
                        f"loader.sources.{name} = {value}: it must be from 0 to below {below}"
                    )
        if state.rest is not None and not state._has(*state.rest):
            raise DamagedStateError(f"loader.rest = {list(state.rest)} is no part of a document")
        return state

    def _has(self, source: int, index: int, offset: int, num_tokens: int) -> bool:
        is_document = 0 <= source < len(self.documents) and 0 <= index < self.documents[source]
        return is_document and 0 <= offset < _BELOW and 0 < num_tokens < _BELOW
