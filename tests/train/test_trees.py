"""Runs over prompts with completions: one curve on any number of ranks, resumed or not."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from ranks import World
from train.test_trainer import PING_PONG, losses, run


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    rng, path = np.random.default_rng(0), tmp_path_factory.mktemp("data") / "groups.jsonl"
    groups = []
    for _ in range(40):
        lengths = rng.integers(1, 40, 4)
        completions = [rng.integers(0, 61, length).tolist() for length in lengths.tolist()]
        prompt = rng.integers(0, 61, int(rng.integers(20, 200))).tolist()
        groups.append({"prompt": prompt, "completions": completions})
    path.write_text("".join(json.dumps(group) + "\n" for group in groups))
    return {
        "data.sources": json.dumps([str(path)]),
        "train.steps": "4",
        "train.checkpoint_every": "2",
    }


@pytest.mark.slow
def test_one_curve(world: World, settings: dict[str, str], tmp_path: Path) -> None:
    alone = run(world, 1, tmp_path / "alone", **settings)
    saved = [record["tokens_saved"] for record in alone]
    assert min(saved) > 1000
    first = run(world, 2, tmp_path / "two", **settings, **PING_PONG, stop_after="2")
    rest = run(world, 2, tmp_path / "two", **settings, **PING_PONG)
    assert [record["step"] for record in first + rest] == [0, 1, 2, 3]
    assert losses(first + rest) == pytest.approx(losses(alone), rel=1e-4)
    assert [record["tokens_saved"] for record in first + rest] == saved
