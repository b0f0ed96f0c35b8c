"""Records of a run: one line of JSON per step."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from distca.train.trackers import Trackers

Record = dict[str, Any]

ABANDONED = "metrics.abandoned.jsonl"


class Records:
    """``metrics.jsonl`` in the folder of a run; a resumed run continues the same file.

    num_abandoned: records of later steps than the one at which this run starts. They are moved to
        ``metrics.abandoned.jsonl``.
    """

    def __init__(self, folder: Path, first_step: int, trackers: Trackers) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._trackers = trackers
        self.path = folder / "metrics.jsonl"
        self.num_abandoned = _abandon_from(self.path, first_step)
        self._file = self.path.open("a")

    def write(self, record: Record) -> None:
        with writing_to(self.path):
            self._file.write(_lines([record]))
            self._file.flush()
        self._trackers.write(record)

    def close(self) -> None:
        with suppress(OSError):  # what could not be written was told by ``write``
            self._file.close()
        self._trackers.close()


@contextmanager
def writing_to(path: Path) -> Iterator[None]:
    """Says in one sentence that something cannot be written."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"{path} cannot be written ({(error.strerror or str(error)).lower()}): free space, or"
            " use another folder"
        ) from error


def read(path: Path) -> list[Record]:
    """Returns all complete records; a run that was killed may have left half a line."""
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


def _abandon_from(path: Path, first_step: int) -> int:
    """Moves the records from a step on to another file; returns how many."""
    if not path.exists():
        return 0
    kept: list[Record] = []
    abandoned: list[Record] = []
    for record in read(path):
        (kept if record["step"] < first_step else abandoned).append(record)
    if abandoned:
        with path.with_name(ABANDONED).open("a") as file:
            file.write(_lines(abandoned))
    if (text := _lines(kept)) != path.read_text():
        new = path.with_suffix(".new")  # a full disk must not cost the records
        new.write_text(text)
        new.replace(path)
    return len(abandoned)


def _lines(records: list[Record]) -> str:
    return "".join(json.dumps(_for_json(record)) + "\n" for record in records)


def _for_json(record: Record) -> Record:
    """Returns a record with null for numbers that JSON does not know."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in record.items()
    }
