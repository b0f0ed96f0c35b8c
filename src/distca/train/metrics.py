"""Records of a run: one line of JSON per step, and TensorBoard if it is installed."""

import json
from pathlib import Path
from typing import Any

Record = dict[str, Any]


class Records:
    """``metrics.jsonl`` in the folder of a run; a resumed run continues the same file."""

    def __init__(self, folder: Path, first_step: int = 0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "metrics.jsonl"
        _drop_from(self.path, first_step)
        self._file = self.path.open("a")
        self._board = _tensorboard(folder)

    def write(self, record: Record) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in record.items():
                if isinstance(value, int | float) and name != "step":
                    self._board.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()


def read(path: Path) -> list[Record]:
    """Returns all complete records; a run that was killed may have left half a line."""
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


def _drop_from(path: Path, first_step: int) -> None:
    """Drops the records of steps after the checkpoint of a resumed run, which it repeats."""
    if path.exists():
        kept = [record for record in read(path) if record["step"] < first_step]
        path.write_text("".join(json.dumps(record) + "\n" for record in kept))


def _tensorboard(folder: Path) -> Any | None:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(folder / "tensorboard")
