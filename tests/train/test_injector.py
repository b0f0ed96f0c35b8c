"""Faults come at their place and once, on real ranks; what a run does about them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from ranks import World
from train.faulty import Events, fit_faulty, fit_slowed, places
from train.runs import fit

from distca.runtime.launched import RESTART
from distca.train.config import Config
from distca.train.fault_log import FaultLog
from distca.train.faults import Fault
from distca.train.injector import Injector
from distca.train.step_folders import newest

TINY = {
    "model.sizes": "{layers=3, hidden=16, heads=2, kv_heads=1, head_dim=8, ffn=16}",
    "data.sources": '["lognormal:60:1.0"]',
    "data.tokenizer": '"ids:61"',
    "data.context": "128",
    "data.held_out": "0.05",
    "train.tokens_per_step": "512",
    "train.steps": "4",
    "train.checkpoint_every": "2",
}
PING_PONG = {"parallel.ping_pong": "true"}
SERVED = {"parallel.servers": "1", "parallel.placement": "given"}
PIPELINE = {"model.sizes": TINY["model.sizes"].replace("layers=3", "layers=4"), "parallel.pp": "2"}
PIPELINE |= {"parallel.micro_batches": "2"}


def settings(out: Path, **changes: str) -> list[str]:
    return [*(f"{name}={value}" for name, value in {**TINY, **changes}.items()), f"out={out}"]


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "faults.jsonl").read_text().splitlines()]


def around(events: Events, fault: str) -> tuple[Any, Any]:
    """What came directly before and after a fault, which must have come once."""
    assert events.count(("fault", fault)) == 1
    at = events.index(("fault", fault))
    return events[at - 1], events[at + 1]


def in_step(events: Events, fault: str) -> tuple[int, Events]:
    """The step in which a fault came, and the passes of that step up to it."""
    until = events[: events.index(("fault", fault))]
    starts = [at for at, event in enumerate(until) if event == ("train",)]
    passes = [event for event in until[starts[-1] :] if event[0] in ("forward", "backward")]
    return len(starts) - 1, passes


@pytest.mark.parametrize("halves", [1, 2])
def test_faults_come_before_their_attention_is_dispatched(
    world: World, tmp_path: Path, halves: int
) -> None:
    texts = [
        "kill worker 1 step 2 layer 1 backward",
        "kill worker 1 step 1 layer 2",
        "drop connection rank 1 step 3 tick 1",
        "stop rank 1 step 0",
    ]
    chosen = settings(tmp_path, **(PING_PONG if halves == 2 else {}))
    first, events = world(2).run(places, chosen, texts, ranks=2)
    assert not [event for event in first if event[0] == "fault"]
    found = [(around(events, text), *in_step(events, text)) for text in texts]
    for ((before, after), step, passes), (where, when, count) in zip(
        found,
        [
            (("backward", 1), 2, 4 * halves + 1),
            (("forward", 2), 1, 2 * halves + 1),
            (("backward", 2), 3, 3 * halves + 1),
            (("forward", 0), 0, 1),
        ],
        strict=True,
    ):
        assert (before, after) == (where, ("dispatch",))
        assert (step, len(passes)) == (when, count)  # before the first half of its layer
    assert {line["fault"] for line in lines(tmp_path)} == set(texts)
    assert {line["rank"] for line in lines(tmp_path)} == {1}


def test_faults_outside_of_attention(world: World, tmp_path: Path) -> None:
    texts = [
        "kill rank 0 step 1 between steps",
        "kill rank 0 step 1 checkpoint",
        "kill rank 0 step 1 evaluation",
    ]
    chosen = settings(tmp_path, **{"train.eval_every": "2", "train.eval_tokens": "512"})
    events, _ = world(2).run(places, chosen, texts, ranks=2)
    between, checkpoint, evaluation = texts
    assert around(events, between) == (("record", 1), ("train",))
    assert around(events, checkpoint)[0] == ("save", 2)
    assert around(events, evaluation) == (("forward", 0), ("dispatch",))
    at = events.index(("fault", evaluation))
    assert events[at - 2] == ("evaluate",)
    assert all(in_step(events, text)[0] == 1 for text in texts)


@pytest.mark.slow
def test_a_server_and_the_stages_of_a_pipeline(world: World, tmp_path: Path) -> None:
    text = "kill server 0 step 1 layer 0 backward"
    *_, server = world(3).run(places, settings(tmp_path / "served", **SERVED), [text], ranks=3)
    assert around(server, text) == (("backward", None), ("dispatch",))
    step, passes = in_step(server, text)
    assert (step, [kind for kind, _ in passes]) == (1, ["forward"] * 3 + ["backward"] * 3)

    # Ticks are F F B F B B. In tick 2 stage 0 only serves stage 1, which has layers 2 and 3; in
    # tick 4 both run backward.
    text = "kill rank 0 step 1 tick 4 layer 0 backward"
    serving = "kill rank 0 step 2 layer 3 backward"
    chosen = settings(tmp_path / "pipeline", **PIPELINE)
    first, _ = world(2).run(places, chosen, [text, serving], ranks=2)
    assert around(first, text) == (("backward", 0), ("dispatch",))
    assert around(first, serving) == (("backward", None), ("dispatch",))
    assert lines(tmp_path / "pipeline")[1]["tick"] == 2


def test_a_fault_in_the_file_does_not_come_again(world: World, tmp_path: Path) -> None:
    text, later = "kill rank 0 step 2", "kill rank 0 step 5"
    chosen = settings(tmp_path)
    events = world(1).run(places, chosen, [text], ranks=1)[0]
    assert ("fault", text) in events
    more = settings(tmp_path, **{"train.steps": "6"})
    again = world(1).run(places, [*more, "from_step=2"], [text, later], ranks=1)[0]
    assert ("record", 2) in again
    assert ("fault", text) not in again
    assert ("fault", later) in again
    assert [line["fault"] for line in lines(tmp_path)] == [text, later]


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_disk_without_space_keeps_the_last_checkpoint(
    world: World, tmp_path: Path, rank: int
) -> None:
    text = f"refuse disk rank {rank} step 3"
    for error, _ in world(2).answers(fit_faulty, settings(tmp_path), [text], ranks=2):
        assert error is not None
        assert error.startswith(f"ValueError: no space left on {tmp_path}/checkpoints: ")
        assert error.endswith("earlier checkpoints are not affected")
    found = newest(tmp_path / "checkpoints")
    assert found is not None
    assert found.name == "step-00000002"
    resumed = world(2).run(fit_faulty, settings(tmp_path), [text], ranks=2)[0]
    assert [record["step"] for record in resumed] == [2, 3]


def test_a_slow_rank_waits_while_it_is_measured(tmp_path: Path) -> None:
    log, now, measured = FaultLog(tmp_path), [0.0], list[float]()

    def sleep(seconds: float) -> None:
        now[0] += seconds

    @contextmanager
    def timed() -> Iterator[None]:
        start = now[0]
        yield
        measured.append(now[0] - start)

    faults = [Fault.parse("slow rank 0 x0.5 steps 1-2"), Fault.parse("slow rank 0 x0.2 step 2")]
    injector = Injector(faults, 0, (), False, log)
    with patch("time.sleep", sleep), patch("time.perf_counter", lambda: now[0]):
        for step in range(4):
            injector.begin(step)
            for _ in range(2):
                with injector.kernels(timed(), torch.device("cpu")):
                    now[0] += 1.0
    assert measured == [1.0] * 2 + [2.0] * 2 + [10.0] * 2 + [1.0] * 2
    assert [(line["fault"], line["step"]) for line in lines(tmp_path)] == [
        ("slow rank 0 x0.5 steps 1-2", 1),
        ("slow rank 0 x0.2 step 2", 2),
    ]


def test_the_file_of_a_run_that_starts_new_is_set_aside(tmp_path: Path) -> None:
    log, fault = FaultLog(tmp_path), Fault.parse("kill rank 0 step 2")
    config = Config.read(None, [f"out={tmp_path}"])
    FaultLog.begin(config)
    log.delivered(fault, 0, 2)
    assert log.missing([fault]) == ()
    with patch.dict("os.environ", {RESTART: "1"}):
        FaultLog.begin(config)  # a restart, before there was a checkpoint
    assert log.counts([fault]).delivered == 1
    FaultLog.begin(config)
    assert log.missing([fault]) == (fault,)
    assert len((tmp_path / "faults.abandoned.jsonl").read_text().splitlines()) == 1


@pytest.mark.slow
def test_a_slow_rank_gets_less_attention(world: World, tmp_path: Path) -> None:
    """Speeds are learned from the time that attention takes, so the delay is inside of it."""
    changes = {
        "model.sizes": TINY["model.sizes"].replace("layers=3", "layers=1"),
        "data.sources": '["lognormal:300:1.0"]',
        "data.context": "1024",
        "train.tokens_per_step": "4096",
        "train.steps": "10",
        "train.checkpoint_every": "0",
        "parallel.cost": '"pairs"',
        "parallel.learn_speed": "on",
    }
    text = "slow rank 2 x0.5 steps 2-9"
    chosen = settings(tmp_path / "slow", **changes)
    slowed = world(4).run(fit_slowed, chosen, [text], ranks=4)[0]
    assert slowed[1]["speeds"] == [1.0] * 4
    assert slowed[-1]["speeds"] == pytest.approx([1, 1, 0.5, 1], abs=0.1)
    assert [line["step"] for line in lines(tmp_path / "slow")] == [2]
    others = settings(tmp_path / "other", **changes | {"parallel.learn_speed": "off"})
    undisturbed = world(4).run(fit, others, ranks=4)[0]
    assert slowed[-1]["bytes"] != undisturbed[-1]["bytes"]  # another plan
    assert [record["loss"] for record in slowed] == pytest.approx(
        [record["loss"] for record in undisturbed], rel=1e-4
    )


def test_a_fault_that_cannot_come_is_told_on_all_ranks(world: World, tmp_path: Path) -> None:
    answers = world(2).answers(fit_faulty, settings(tmp_path), ["kill rank 2 step 1"], ranks=2)
    words = "--inject 'kill rank 2 step 1': there is no rank 2: this run has ranks 0 to 1"
    assert [error for error, _ in answers] == [f"ValueError: {words}"] * 2
