"""Plans of a run follow the speed of its ranks, on real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import World
from train.runs import fit, with_a_slow_rank
from train.test_trainer import TINY

from distca.train import setup
from distca.train.config import Config

SIZES = {
    "model.sizes": "{layers=1, hidden=16, heads=2, kv_heads=1, head_dim=8, ffn=16}",
    "data.sources": '["lognormal:300:1.0"]',
    "data.context": "1024",
    "train.tokens_per_step": "4096",
    "parallel.cost": '"pairs"',
}


def settings(out: Path, **changes: str) -> list[str]:
    return [f"{name}={value}" for name, value in {**TINY, **SIZES, **changes}.items()] + [
        f"out={out}"
    ]


def imbalance(records: list[dict[str, Any]], start: int, stop: int) -> list[float]:
    return [record["imbalance_measured"] for record in records[start:stop]]


@pytest.mark.slow
def test_a_slow_rank_gets_less_within_ten_steps_and_as_much_as_others_after(
    world: World, tmp_path: Path
) -> None:
    slow, steps, few = (6, 24), 40, 14

    def run(stop_after: int, learns: str) -> list[dict[str, Any]]:
        changes = {"train.steps": str(steps), "parallel.learn_speed": learns}
        chosen = [*settings(tmp_path / learns, **changes), f"stop_after={stop_after}"]
        records: list[dict[str, Any]] = world(4).run(with_a_slow_rank, chosen, slow, ranks=4)[0]
        return records

    without, learned = run(few, "off"), run(steps, "on")
    assert np.median(imbalance(without, slow[0], few)) > 1.3
    for start, stop in ((slow[0] + 10, slow[1]), (slow[1] + 10, steps)):
        assert np.median(imbalance(learned, start, stop)) <= 1.05
    assert learned[slow[1] - 1]["speeds"] == pytest.approx([1, 1, 0.6, 1], abs=0.05)
    assert learned[-1]["speeds"] == [1.0] * 4
    losses = [[record["loss"] for record in records[:few]] for records in (learned, without)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.slow
def test_a_slow_rank_is_compensated_for_its_other_work(world: World, tmp_path: Path) -> None:
    steps = {"train.steps": "12", "parallel.learn_speed": "on"}
    runs = []
    for compensates in ("false", "true"):
        changes = {**steps, "parallel.compensate": compensates}
        chosen = settings(tmp_path / compensates, **changes)
        runs.append(world(4).run(with_a_slow_rank, chosen, (0, 12), ranks=4)[0])
    without, compensated = ([record["speeds"] for record in records] for records in runs)
    assert without[-1] == pytest.approx([1, 1, 0.6, 1], abs=0.15)
    assert compensated[-1][2] < without[-1][2] - 0.1
    losses = [[record["loss"] for record in records] for records in runs]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_speeds_are_in_the_records_and_given_ones_are_the_start(
    world: World, tmp_path: Path
) -> None:
    changes = {"train.steps": "2", "parallel.speed": "[1.0, 0.5]"}
    for learns in ("on", "off"):
        chosen = settings(tmp_path / learns, **changes, **{"parallel.learn_speed": learns})
        records = world(2).run(fit, chosen, ranks=2)[0]
        assert [record["speeds"] for record in records] == [[1.0, 0.5]] * 2
        of_ranks = [record["ranks"]["attention_s"] for record in records]
        assert [len(seconds) for seconds in of_ranks] == [2, 2]
        for record, seconds in zip(records, of_ranks, strict=True):
            mean = sum(seconds) / 2
            assert record["imbalance_measured"] == pytest.approx(max(seconds) / mean, rel=0.01)


@pytest.mark.parametrize(
    ("settings", "on_cpus", "on_gpus"),
    [
        ([], False, True),
        (["parallel.learn_speed=on"], True, True),
        (["parallel.compensate=true"], True, True),
        (["parallel.learn_speed=off"], False, False),
        (["parallel.learn_speed=on", "train.deterministic=true"], False, False),
        (["parallel.learn_speed=on", 'parallel.policy="greedy"'], True, True),
        (['parallel.policy="colocated"', 'parallel.placement="given"'], False, False),
    ],
)
def test_what_learns(settings: list[str], on_cpus: bool, on_gpus: bool) -> None:
    config = Config.read(None, settings)
    found = [setup.learns_speed(config, torch.device(name)) for name in ("cpu", "cuda")]
    assert found == [on_cpus, on_gpus]


@pytest.mark.parametrize("setting", ["parallel.learn_speed=off", "parallel.servers=1"])
def test_compensation_that_cannot_be_is_refused(setting: str) -> None:
    settings = ["parallel.learn_speed=on", "parallel.compensate=true"]
    assert Config.read(None, settings).parallel.compensate
    with pytest.raises(ValueError, match=r"^parallel.compensate = true with learn_speed = .* it"):
        Config.read(None, [*settings, setting])
