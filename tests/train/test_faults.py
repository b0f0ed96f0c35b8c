"""Faults as text, and the sentence for each that cannot be meant or cannot come."""

from __future__ import annotations

from contextlib import suppress
from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distca.train import setup
from distca.train.config import Config
from distca.train.fault_places import TickSlots, check_faults
from distca.train.faults import Fault, Steps, parse_all

TEXTS = {
    "kill server 1 step 5 layer 3 backward": Fault(
        "kill", "server", 1, Steps(5, 5), layer=3, place="backward"
    ),
    "stop rank 2 for 3.5s step 7 tick 1": Fault(
        "stop", "rank", 2, Steps(7, 7), seconds=3.5, tick=1
    ),
    "stop worker 0 step 0": Fault("stop", "worker", 0, Steps(0, 0)),
    "slow rank 2 x0.6 steps 5-12": Fault("slow", "rank", 2, Steps(5, 12), speed=0.6),
    "drop connection rank 1 step 4 between steps": Fault(
        "drop connection", "rank", 1, Steps(4, 4), place="between steps"
    ),
    "kill worker 1 step 3 evaluation": Fault("kill", "worker", 1, Steps(3, 3), place="evaluation"),
    "kill new server 0 step 9 backward": Fault(
        "kill", "new server", 0, Steps(9, 9), place="backward"
    ),
    "refuse disk rank 1 step 9": Fault("refuse disk", "rank", 1, Steps(9, 9), place="checkpoint"),
}


@pytest.mark.parametrize("text", TEXTS)
def test_a_fault_is_its_text(text: str) -> None:
    fault = Fault.parse(text)
    assert fault == TEXTS[text]
    assert str(fault) == text


@pytest.mark.parametrize(
    "clauses",
    [
        ("kill", "server 1", "step 5", "layer 3", "backward"),
        ("stop", "rank 2", "for 3s", "step 7", "between steps"),
        ("slow", "rank 2", "x0.6", "steps 5-12"),
    ],
)
def test_what_follows_the_action_may_come_in_any_order(clauses: tuple[str, ...]) -> None:
    action, *others = clauses
    for order in permutations(others):
        assert str(Fault.parse(" ".join([action, *order]))) == " ".join(clauses)


MISTAKES = {
    "": "names no fault: write it like",
    "kill": "names no rank: write it like",
    "kill step 3": "names no rank: write it like",
    "kill rank 1": "names no step: write it like",
    "kil rank 1 step 5": "is not understood at 'kil rank 1 step 5': write it like 'kill rank 1",
    "kill rank one step 5": "is not understood at 'rank one step 5'",
    "kill rank -1 step 5": "is not understood at 'rank -1 step 5'",
    "kill rank 1 step 5 now": "is not understood at 'now'",
    "kill rank 1 step 5.5": "is not understood at 'step 5.5'",
    "kill rank 1 step 5 forwards": "is not understood at 'forwards'",
    "drop rank 1 step 5": "is not understood at 'drop rank 1 step 5'",
    "rank 1 kill step 5": "does not start with what happens: start with one of kill, stop, slow",
    "kill rank 1 server 0 step 5": "has both 'rank 1' and 'server 0': give one",
    "kill rank 1 step 5 step 6": "has both 'step 5' and 'step 6'",
    "kill rank 1 step 5 forward backward": "has both 'forward' and 'backward'",
    "kill stop rank 1 step 5": "has both 'kill' and 'stop'",
    "kill rank 1 steps 3-5": "kill comes at one step: give 'step 3', or several faults",
    "slow rank 1 x0.5 steps 5-3": "steps 5-3 end before they start",
    "slow rank 1 steps 3-5": "slow needs a speed between 0 and 1",
    "slow rank 1 x1 step 5": "slow needs a speed between 0 and 1",
    "slow rank 1 x0 step 5": "slow needs a speed between 0 and 1",
    "slow rank 1 x0.5 step 5 layer 1": "a rank is slow in all attention of its steps",
    "slow rank 1 x0.5 step 5 backward": "a rank is slow in all attention of its steps",
    "kill rank 1 x0.5 step 5": "only slow has a speed: leave out 'x0.5'",
    "kill rank 1 for 3s step 5": "only stop lasts for some seconds: leave out 'for 3s'",
    "stop rank 1 for 0s step 5": "a stop for 0 s is none",
    "refuse disk rank 1 step 5 forward": "only checkpoints are written to the disk",
    "refuse disk rank 1 step 5 layer 1": "only checkpoints are written to the disk",
    "kill rank 1 step 5 layer 1 checkpoint": "nothing to do with 'checkpoint'",
    "kill rank 1 step 5 tick 0 between steps": "nothing to do with 'between steps'",
}


@pytest.mark.parametrize("text", MISTAKES)
def test_nonsense_is_told_in_one_sentence(text: str) -> None:
    with pytest.raises(ValueError, match=r"^--inject") as raised:
        Fault.parse(text)
    assert MISTAKES[text] in str(raised.value)
    assert repr(text) in str(raised.value)


CLAUSES = (
    *("kill", "stop", "slow", "refuse disk", "rank 1", "server 0", "step 5", "steps 2-4", "for 3s"),
    *("x0.5", "tick 1", "layer 2", "forward", "checkpoint", "between steps", "now", "-", "x"),
)


@given(st.lists(st.sampled_from(CLAUSES), max_size=6))
def test_any_words_are_a_fault_or_a_mistake(words: list[str]) -> None:
    with suppress(ValueError):  # and no other error
        fault = Fault.parse(" ".join(words))
        implied = "checkpoint" if fault.action == "refuse disk" else ""
        assert sorted(str(fault).split()) == sorted(
            word for word in " ".join(words).split() if word != implied
        )


def test_a_fault_that_is_given_twice_is_refused() -> None:
    assert len(parse_all(["kill rank 1 step 5", "kill rank 1 step 6"])) == 2
    with pytest.raises(ValueError, match=r"'kill rank 1 step 5' is given twice"):
        parse_all(["kill rank 1 step 5", "kill  step 5 rank 1"])


def components(*settings: str, ranks: int) -> tuple[setup.Components, Config]:
    sizes = "model.sizes={layers=4, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=48}"
    few = ("data.sources=fixed:64", "data.tokenizer=ids:61", "data.context=64")
    train = ("train.tokens_per_step=256", "train.steps=10", "train.checkpoint_every=4")
    config = Config.read(None, [sizes, *few, *train, "train.eval_every=5", *settings])
    return setup.Components.of(config, ranks, torch.device("cpu")), config


SERVED = ("parallel.servers=2",)
PIPELINE = ("parallel.pp=2", "parallel.micro_batches=2")
FROZEN = ('train.frozen=["*embed*", "seams.0.*", "seams.1.*"]',)
IMPOSSIBLE = [
    ((), "kill rank 4 step 5", "there is no rank 4: this run has ranks 0 to 3"),
    ((), "kill worker 4 step 5", "there is no worker 4: this run has workers 0 to 3"),
    ((), "kill server 0 step 5", "this run has no dedicated servers: name a rank, or set"),
    (SERVED, "kill server 2 step 5", "there is no server 2: this run has servers 0 to 1"),
    ((), "kill new server 0 step 5", "this run has no dedicated servers: name a rank, or set"),
    (SERVED, "kill new server 0 step 0", "step 0 has no new servers: give a later step"),
    (SERVED, "kill new server 0 step 3 checkpoint", "new server 0 is a dedicated server and"),
    (SERVED, "kill worker 2 step 5", "there is no worker 2: this run has workers 0 to 1"),
    (SERVED, "refuse disk server 0 step 3", "server 0 is a dedicated server and writes nothing"),
    (SERVED, "kill rank 3 step 3 checkpoint", "rank 3 is a dedicated server and writes nothing"),
    ((), "kill rank 0 step 10", "there is no step 10: steps are numbered from 0 to 9"),
    ((), "slow rank 0 x0.5 steps 5-10", "there is no step 10"),
    ((), "kill rank 0 step 9 between steps", "step 9 is the last one: give an earlier step"),
    ((), "refuse disk rank 0 step 4", "no checkpoint is written after step 4: give another step"),
    ((), "kill rank 0 step 5 evaluation", "there is no evaluation after step 5: give another"),
    ((), "kill rank 0 step 5 layer 4", "there is no layer 4: the model has layers 0 to 3"),
    ((), "kill rank 0 step 5 tick 2", "there is no tick 2: the schedule has ticks 0 to 1"),
    (
        (),
        "kill rank 0 step 5 tick 0 backward",
        "tick 0 has no attention backward: it is in ticks 1",
    ),
    (PIPELINE, "kill rank 0 step 5 tick 0 layer 2", "tick 0 has no attention of layer 2: it is in"),
    (FROZEN, "kill rank 0 step 5 layer 0 backward", "no tick has attention of layer 0 backward"),
]


@pytest.mark.parametrize(
    ("settings", "text", "words"), IMPOSSIBLE, ids=[t for _, t, _ in IMPOSSIBLE]
)
def test_what_cannot_come_in_a_run_is_told(
    settings: tuple[str, ...], text: str, words: str
) -> None:
    own, config = components(*settings, ranks=4)
    with pytest.raises(ValueError, match=r"^--inject") as raised:
        check_faults([Fault.parse(text)], own.planner, config.train)
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ((), "kill rank 3 step 9 tick 1 layer 3 backward"),
        ((), "kill worker 0 step 9 checkpoint"),
        ((), "refuse disk rank 3 step 3"),
        ((), "kill rank 0 step 4 evaluation"),
        ((), "kill rank 0 step 9 evaluation"),
        ((), "stop rank 0 step 8 between steps"),
        (SERVED, "kill server 1 step 0 layer 0"),
        (SERVED, "kill new server 5 step 1 layer 0"),
        (PIPELINE, "kill rank 0 step 5 tick 1 layer 2 forward"),
        (FROZEN, "kill rank 0 step 5 layer 2 backward"),
    ],
)
def test_what_can_come_is_not_refused(settings: tuple[str, ...], text: str) -> None:
    own, config = components(*settings, ranks=4)
    check_faults([Fault.parse(text)], own.planner, config.train)


@pytest.mark.parametrize("settings", [(), SERVED, PIPELINE, FROZEN], ids=str)
def test_the_slots_are_those_of_a_plan(settings: tuple[str, ...]) -> None:
    own, _ = components(*settings, ranks=4)
    plan = own.planner.plan(np.full(4, 64))
    found = TickSlots.of(own.planner)
    assert [len(tick.slots) for tick in found] == [len(slots) for slots in plan.slots]
    assert [tick.direction[0].upper() for tick in found] == [
        tick.phase for tick in plan.schedule.ticks
    ]


def test_ranks_of_workers_and_servers() -> None:
    own, _ = components(*SERVED, ranks=4)
    roles = ("rank 1", "worker 1", "server 1", "new server 1")
    faults = [Fault.parse(f"kill {role} step 1") for role in roles]
    assert [fault.rank(own.parallel) for fault in faults] == [1, 1, 3, 5]
