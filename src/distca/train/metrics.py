"""Records of a run: one line of JSON per step, and the ticks of two of its steps."""

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

from distca.runtime.disk import writing
from distca.train.trackers import Trackers

Record = dict[str, Any]

FILE, ABANDONED = "metrics.jsonl", "metrics.abandoned.jsonl"
TICKS = "ticks.json"


class Records:
    """``metrics.jsonl`` in the folder of a run; a resumed run continues the same file.

    The ticks of a step are large where there are many ranks, so ``ticks.json`` keeps only those of
    the newest step, and of the slowest one since the start. The first step, which loads kernels,
    is not the slowest.

    num_abandoned: records of later steps than the one at which this run starts. They are moved to
        ``metrics.abandoned.jsonl``.
    """

    def __init__(self, folder: Path, first_step: int, trackers: Trackers) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._trackers = trackers
        self.path = folder / FILE
        self.num_abandoned = _abandon_from(self.path, first_step)
        self._file = self.path.open("a")
        self._first_step, self._ticks = first_step, dict[str, Record]()
        if first_step == 0:
            self.path.with_name(TICKS).unlink(missing_ok=True)  # of another run

    def write(self, record: Record) -> None:
        """Writes the record of a step, and takes the ticks out of it."""
        ticks = record.pop("ticks", None)
        with writing(self.path):
            self._file.write(_lines([record]))
            self._file.flush()
        if ticks is not None:
            self._write_ticks({"step": record["step"], "seconds": record["seconds"], **ticks})
        self._trackers.write(record)

    def _write_ticks(self, newest: Record) -> None:
        self._ticks["newest"] = newest
        slowest = self._ticks.get("slowest")
        if newest["step"] > self._first_step and (
            slowest is None or newest["seconds"] > slowest["seconds"]
        ):
            self._ticks["slowest"] = newest
        path = self.path.with_name(TICKS)
        with writing(path):
            _replace(path, json.dumps(self._ticks, separators=(",", ":")))

    def close(self) -> None:
        with suppress(OSError):  # what could not be written was told by ``write``
            self._file.close()
        self._trackers.close()


def read(path: Path) -> list[Record]:
    """Returns all complete records; a run that was killed may have left half a line.

    Raises ValueError for other lines.
    """
    try:
        text = path.read_text()
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not text: delete it, or move it away") from None
    records = []
    for line in text.splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if not isinstance(record, dict) or not _is_record(record):
            raise ValueError(
                f"{path} holds lines that are no records of steps, such as {line[:40]!r}: delete"
                " them, or move the file away"
            )
        records.append(record)
    return records


def _is_record(line: Record) -> bool:
    loss = line.get("loss")
    return isinstance(line.get("step"), int) and isinstance(loss, int | float | None)


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
        _replace(path, text)
    return len(abandoned)


def _replace(path: Path, text: str) -> None:
    """Writes a file at once: a full disk must not cost what it had."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


def _lines(records: list[Record]) -> str:
    return "".join(json.dumps(for_json(record)) + "\n" for record in records)


def for_json(record: Record) -> Record:
    """Returns a record with null for numbers that JSON does not know."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in record.items()
    }
