"""What a checkpoint has besides tensors, in ``extra.json``, and whether a run may go on from it.

    {"step": 120, "loader": {...}, "model": {...}}

Checkpoints of earlier versions do not say from which model they are. Of their models, shapes of
weights are all that can be compared (``train.state``).
"""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from distca import schema
from distca.data.loader import Loader
from distca.data.loader_state import DamagedStateError
from distca.model.config import ModelConfig
from distca.train.agreement import differences
from distca.train.config import Config
from distca.train.digests import check_digest
from distca.train.step_folders import (
    COMPLETE,
    EXTRA,
    DamagedCheckpointError,
    complete,
    find,
    newest,
    step_of,
)

Extra = dict[str, Any]
CheckExtra = Callable[[Path, Extra], None]  # given the folder of a checkpoint


def extra_of(step: int, loader: dict[str, Any], model: ModelConfig) -> Extra:
    return {"step": step, "loader": loader, "model": asdict(model)}


def read_extra(path: Path) -> Extra:
    """Returns the ``extra`` of a complete checkpoint, whose step is that of its folder."""
    if not (path / COMPLETE).is_file():
        what = "is an incomplete checkpoint" if path.is_dir() else "does not exist"
        latest = newest(path.parent)
        hint = f"the newest complete one is {latest.name}" if latest else "choose another one"
        raise ValueError(f"{path} {what}: {hint}")
    check_digest(path, EXTRA)
    try:
        if not (path / EXTRA).is_file():  # a pipe would be read without end
            raise ValueError("not a file")
        extra = json.loads((path / EXTRA).read_text())
        if not isinstance(extra, dict):
            raise ValueError("not a JSON object")
        step = extra.get("step", "missing")
        if type(step) is not int or step != step_of(path):
            raise ValueError(f"step is {step!r} in the folder of step {step_of(path)}")
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(path, error) from None
    return extra


def check_extra(path: Path, extra: Extra, model: ModelConfig, loader: Loader) -> None:
    """Raises ValueError unless a run with this model and this data may go on from a checkpoint."""
    check_model(path, extra, model)
    try:
        loader.check(extra.get("loader"))
    except DamagedStateError as error:
        raise _damaged(path, error) from None


def check_model(path: Path, extra: Extra, model: ModelConfig) -> None:
    """Raises ValueError if a checkpoint is from a model that computes something else."""
    if "model" not in extra:
        return
    try:
        saved = schema.build(ModelConfig, extra["model"], "model")
    except ValueError as error:
        raise _damaged(path, error) from None
    if found := differences(_by_key(saved), _by_key(model), "there", "here"):
        raise ValueError(
            f"{path} was saved from another model, {found}: use the model that it was saved from,"
            " or another folder; a new run can start from these weights, as distca export writes"
            " them, with model.path"
        )


def check_resumable(config: Config, model: ModelConfig, loader: Loader) -> None:
    """Raises ValueError if a run may not go on from the checkpoint that it would resume.

    All ranks do the same when they load it (``Checkpoints.resume``); this is before they start.
    """
    folder, is_chosen = Path(config.out) / "checkpoints", config.from_step >= 0
    if not config.resume:
        return
    for path in [find(folder, config.from_step)] if is_chosen else complete(folder):
        try:
            check_extra(path, read_extra(path), model, loader)
        except DamagedCheckpointError:
            if is_chosen:
                raise
        else:
            return


def _by_key(model: ModelConfig) -> dict[str, Any]:
    """Returns by key what the results of a model depend on."""
    values = {f"model.sizes.{name}": value for name, value in asdict(model).items()}
    del values["model.sizes.context"]
    return values


def _damaged(path: Path, error: Exception) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        f"{path / EXTRA} is damaged ({error}): load an earlier checkpoint"
    )
