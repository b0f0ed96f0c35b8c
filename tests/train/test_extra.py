"""What a checkpoint has besides tensors: damage is told from a run that may not go on from it."""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from runtime.bodies import TINY

from distca.data.loader import Loader
from distca.data.sources import open_source
from distca.data.tokenizers import open_tokenizer
from distca.model.config import RopeScaling
from distca.train.config import Config
from distca.train.extra import check_extra, check_resumable, extra_of, read_extra
from distca.train.step_folders import COMPLETE, EXTRA, DamagedCheckpointError


@pytest.fixture
def loader() -> Loader:
    source = open_source("fixed:12", open_tokenizer("ids:50"), context=20)
    loader = Loader([source], tokens_per_step=20, context=20, held_out=2)
    loader.next_batch()
    return loader


def saved(
    folder: Path, loader: Loader, step: int = 4, changes: Mapping[str, Any] | None = None
) -> Path:
    """A checkpoint without tensors."""
    path = folder / "checkpoints" / f"step-{step:08d}"
    path.mkdir(parents=True)
    (path / COMPLETE).touch()
    extra = extra_of(step, loader.state(), TINY) | dict(changes or {})
    (path / EXTRA).write_text(json.dumps(extra))
    return path


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rope_theta": 77.0}, "model.sizes.rope_theta is 10000.0 there and 77.0 here"),
        ({"window": 16}, "model.sizes.window is None there and 16 here"),
        ({"norm_eps": 0.1}, "model.sizes.norm_eps is 1e-05 there and 0.1 here"),
        (
            {"ffn": 64, "qk_norm": True},
            "model.sizes.ffn is 48 there and 64 here, model.sizes.qk_norm is False there and True",
        ),
        (
            {"rope_scaling": RopeScaling("linear", 2.0)},
            "model.sizes.rope_scaling is None there and {'kind': 'linear', 'factor': 2.0",
        ),
    ],
    ids=["theta", "window", "eps", "sizes", "scaling"],
)
def test_another_model_is_named(
    tmp_path: Path, loader: Loader, change: dict[str, Any], words: str
) -> None:
    path = saved(tmp_path, loader)
    check_extra(path, read_extra(path), TINY, loader)
    check_extra(path, read_extra(path), replace(TINY, context=99), loader)  # computes the same
    with pytest.raises(ValueError, match=re.escape(words)) as raised:
        check_extra(path, read_extra(path), replace(TINY, **change), loader)
    assert str(raised.value).startswith(f"{path} was saved from another model, model.sizes.")
    assert "use the model that it was saved from, or another folder; a new" in str(raised.value)
    assert not isinstance(raised.value, DamagedCheckpointError)


def test_scaled_positions_come_back_from_json(tmp_path: Path, loader: Loader) -> None:
    model = replace(TINY, rope_scaling=RopeScaling("llama3", 8.0), window=5, window_pattern=2)
    path = saved(tmp_path, loader, changes={"model": asdict(model)})
    check_extra(path, read_extra(path), model, loader)


def test_an_earlier_version_did_not_say_from_which_model(tmp_path: Path, loader: Loader) -> None:
    path = saved(tmp_path, loader)
    (path / EXTRA).write_text(json.dumps({"step": 4, "loader": loader.state()}))
    check_extra(path, read_extra(path), replace(TINY, rope_theta=77.0), loader)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"step": "x"}, "step is 'x' in the folder of step 4"),
        ({"step": float("nan")}, "step is nan in the folder of step 4"),
        ({"step": float("inf")}, "step is inf in"),
        ({"step": -3}, "step is -3 in"),
        ({"step": 99}, "step is 99 in"),
        ({"step": 4.0}, "step is 4.0 in"),
        ({"step": None}, "step is None in"),
        ({"model": None}, "model = None: it must be a section"),
        ({"model": []}, r"model = []: it must be a section"),
        ({"model": {**asdict(TINY), "ffn": "x"}}, "model.ffn = 'x': it must be a whole number"),
        ({"model": {**asdict(TINY), "heads": 0}}, "heads = 0: it must be from 1 to 1000000"),
        ({"model": {}}, "model.vocab_size is missing"),
        ({"loader": None}, "loader = None: it must be a section"),
        ({"loader": {}}, "loader.seed is missing"),
    ],
)
def test_a_damaged_record_is_passed_over(
    tmp_path: Path, loader: Loader, change: dict[str, Any], words: str
) -> None:
    """The one before counts, unless the damaged one was chosen."""
    config = Config.read(None, [f"out={tmp_path}"])
    path = saved(tmp_path, loader, changes=change)
    with pytest.raises(DamagedCheckpointError, match=re.escape(words)) as raised:
        check_extra(path, read_extra(path), TINY, loader)
    assert str(raised.value).startswith(f"{path}/{EXTRA} is damaged (")
    assert str(raised.value).endswith("): load an earlier checkpoint")
    check_resumable(config, TINY, loader)  # the ranks say that none can be loaded
    with pytest.raises(DamagedCheckpointError):
        check_resumable(replace(config, from_step=4), TINY, loader)
    saved(tmp_path, loader, 3, {"model": asdict(replace(TINY, window=16))})
    with pytest.raises(ValueError, match="step-00000003 was saved from another model"):
        check_resumable(config, TINY, loader)
    check_resumable(replace(config, resume=False), TINY, loader)


def test_json_without_an_end_to_its_levels_is_damage(tmp_path: Path, loader: Loader) -> None:
    path = saved(tmp_path, loader)
    (path / EXTRA).write_text('{"step":' * 100_000)
    with pytest.raises(DamagedCheckpointError, match="recursion"):
        read_extra(path)
