"""Finds out what ``distca report`` was given, and reads it."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from distca.cli.compare import SIDES
from distca.data.readers import read_json
from distca.report.pages.page import Page
from distca.report.pages.plan import plan_page
from distca.report.pages.replay import replay_page
from distca.report.pages.run import run_page
from distca.report.pages.run_events import Run
from distca.report.pages.simulation import simulation_page
from distca.report.pages.timeline import timeline_record
from distca.train.metrics import read

METRICS, FAULTS, CONFIG, TRACE, TICKS = RUN_FILES = (
    "metrics.jsonl", "faults.jsonl", "config.json", "traces/trace.json", "ticks.json",
)  # fmt: skip
BEFORE_FIRST_STEP = ("run.lock", "logs")
KNOWN = (
    "give the folder of a run of distca train, or a file of distca plan --out, distca simulate"
    " --json or distca bench replay --json"
)


def read_page(paths: Sequence[Path]) -> tuple[str, Page]:
    """Returns the kind of what was given, and its page; raises ValueError if it has none."""
    first = paths[0]
    if len(paths) > 1 or first.is_dir() or first.name == METRICS:
        folders = find_runs(paths)
        for folder in folders:
            if not _records(folder):
                raise ValueError(
                    f"{folder} has no finished step yet: wait for one, or follow it with --live"
                )
        return "run", runs_page(folders)
    return _read_file(first)


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """Returns the folders of one or two runs; ``distca train --compare`` leaves two in a folder."""
    if len(paths) > 2:
        raise ValueError(f"{len(paths)} paths: give one, or two runs to compare")
    folders = []
    for path in paths:
        if path.name == METRICS and path.is_file():
            path = path.parent
        if not path.is_dir():
            what = "is a file, not the folder of a run" if path.exists() else "does not exist"
            raise ValueError(f"{path} {what}: {KNOWN}")
        sides = [path / side for side in SIDES if (path / side / METRICS).is_file()]
        folders += sides if len(paths) == 1 and len(sides) == len(SIDES) else [path]
    for folder in folders:
        names = {entry.name for entry in folder.iterdir()}
        if names and names.isdisjoint({*RUN_FILES, *BEFORE_FIRST_STEP}):
            raise ValueError(f"{folder} holds no {METRICS}, so it is not a run: {KNOWN}")
    return folders


def runs_page(folders: Sequence[Path]) -> Page:
    """Returns the page of one or two runs, which may still go on."""
    names = [str(folder) for folder in folders]
    if len(set(names)) > 1 and len({folder.name for folder in folders}) == len(folders):
        names = [folder.name for folder in folders]
    runs = []
    for folder, name in zip(folders, names, strict=True):
        faults = folder / FAULTS
        config, trace, ticks = (folder / name for name in (CONFIG, TRACE, TICKS))
        runs.append(
            Run(
                name,
                _records(folder),
                [line for line in read(faults) if "step" in line] if faults.exists() else [],
                read_json(config) if config.exists() else {},
                str(trace) if trace.exists() else "",
                read_json(ticks) if ticks.exists() else {},
            )
        )
    return _made_of(", ".join(map(str, folders)), "distca train", run_page, runs)


def run_state(folders: Sequence[Path]) -> str:
    """Returns a text that changes whenever the files of a run do."""
    stats = [
        (folder / name).stat()
        for folder in folders
        for name in RUN_FILES
        if (folder / name).exists()
    ]
    return "-".join(f"{stat.st_size:x}.{stat.st_mtime_ns:x}" for stat in stats) or "empty"


def _records(folder: Path) -> list[dict[str, Any]]:
    path = folder / METRICS
    if not path.exists():
        return []
    records = read(path)
    if not records and path.read_text().count("\n") > 1:
        raise ValueError(f"{path} holds no record of a step, but other lines: {KNOWN}")
    return records


def _read_file(path: Path) -> tuple[str, Page]:
    if not path.exists():
        raise ValueError(f"{path} does not exist: {KNOWN}")
    data = _parse(path)
    for kind, keys, command, make in _KINDS:
        if isinstance(data, dict) and keys <= data.keys():
            return kind, _made_of(str(path), command, partial(make, str(path)), data)
    raise ValueError(f"{path} is neither a run, a plan, a simulation nor a replay: {KNOWN}")


def _parse(path: Path) -> Any:
    """Returns the value of a JSON file; lines of records, as replays append them, are its cases."""
    text = path.read_bytes().strip()
    if not text:
        raise ValueError(f"{path} is empty: {KNOWN}")
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        try:
            data = [json.loads(line) for line in text.splitlines()]
        except (ValueError, RecursionError):
            raise ValueError(
                f"{path} is damaged or not JSON ({error}): make it again, or {KNOWN}"
            ) from None
        return {"cases": data}
    is_case = isinstance(data, dict) and {"rows", "factors"} <= data.keys()
    return {"cases": [data]} if is_case else data


def _made_of(where: str, command: str, make: Callable[[Any], Page], data: Any) -> Page:
    """Returns a page of values that may have been edited, so nothing about them is assumed."""
    try:
        return make(data)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    except (LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(
            f"{where} is damaged ({type(error).__name__}: {error}): make it again with {command}"
        ) from error


def _plan(name: str, data: Any) -> Page:
    from distca.cli.plan_pieces import pieces_record

    return plan_page(name, pieces_record(data))


def _simulation(name: str, data: Any) -> Page:
    """Returns the page of a simulation, with its timeline if that is still where it was written."""
    trace = Path(data.get("trace") or "")
    found = [path for path in (trace, Path(name).parent / trace.name) if path.is_file()]
    return simulation_page(name, data, timeline_record(read_json(found[0])) if found else None)


# What a file holds, by the keys of its JSON: its kind, the command that makes it, and its page.
_KINDS: Sequence[tuple[str, set[str], str, Callable[[str, Any], Page]]] = (
    ("plan", {"placement", "tasks"}, "distca plan --out", _plan),
    ("simulation", {"runs", "cluster"}, "distca simulate --json", _simulation),
    (
        "replay",
        {"cases"},
        "distca bench replay --json",
        lambda name, data: replay_page(name, data["cases"]),
    ),
)
