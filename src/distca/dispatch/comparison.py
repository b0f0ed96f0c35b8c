"""Compares what the ranks of a group announce, many records at once."""

from __future__ import annotations

from collections.abc import Sequence


class Comparison:
    """The records that are not compared yet; those of a rank are numbered in their order."""

    def __init__(self, num_ranks: int) -> None:
        self._first = 0  # the index of the first record that is not compared
        self._records: list[list[str]] = [[] for _ in range(num_ranks)]

    def add(self, rank: int, records: Sequence[str]) -> None:
        self._records[rank] += records

    def at(self, index: int) -> list[str | None]:
        """Returns the record of each rank; None where it has not come, or is compared already."""
        place = index - self._first
        return [records[place] if 0 <= place < len(records) else None for records in self._records]

    @property
    def incomplete(self) -> range:
        """The indices of records that some ranks have announced, after ``compare``."""
        return range(self._first, self._first + max(map(len, self._records)))

    def compare(self) -> dict[int, list[str]]:
        """Compares what all ranks have announced; returns the records that differ, by index."""
        num = min(map(len, self._records))
        first, compared = self._first, [records[:num] for records in self._records]
        self._first += num
        for records in self._records:
            del records[:num]
        if all(records == compared[0] for records in compared):
            return {}
        by_index = enumerate(zip(*compared, strict=True), first)
        return {index: list(records) for index, records in by_index if len(set(records)) > 1}

    @property
    def num_compared(self) -> int:
        return self._first
