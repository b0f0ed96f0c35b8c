"""Dedicated servers join and leave a run between two steps, and its numbers stay the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from train.dying_servers import Death, Newcomer, Plan
from train.test_lost_servers import STEPS, records, run


def check(seen: list[Any], right: list[dict[str, Any]]) -> list[tuple[str, int, int]]:
    """Compares the records of rank 0; returns what has become of servers, in order."""
    found = records(seen)
    assert [record["step"] for record in found] == list(range(STEPS))
    changes = []
    for record, expected in zip(found, right, strict=True):
        for name in {"loss", "grad_norm", "eval_loss"} & expected.keys():
            assert record[name] == pytest.approx(expected[name], rel=1e-6), name
        for kind in ("lost_servers", "left_servers", "joined_servers"):
            changes += [(kind, one["rank"], one["servers"]) for one in record.get(kind, ())]
    return changes


def test_one_dies_another_joins_and_a_third_leaves(
    tmp_path: Path, undisturbed: list[dict[str, Any]]
) -> None:
    newcomers = Newcomer(wish=3), Newcomer(version="0.0.1")
    plan = Plan(waits={1: 1}, leaves={2: 2})
    seen = run(tmp_path / "out", 2, Death(3, "forward", 3), newcomers=newcomers, plan=plan)
    assert check(seen, undisturbed) == [
        ("lost_servers", 3, 1),
        ("joined_servers", 3, 2),
        ("left_servers", 2, 1),
    ]
    told = seen[0]["told"]
    assert any(
        words.startswith("rank 3, a dedicated server, has joined before step 3") for words in told
    )
    assert any("rank 2, a dedicated server, has left on request" in words for words in told)
    assert seen[2]["error"] == ""
    assert len(seen[2]["records"]) == 4
    _, fits, refused = seen[3:]
    assert fits[1:] == ["serves as rank 3 from step 3 on", "the run has ended"]
    assert refused[0].startswith("ValueError: version of distca is ")
    assert refused[0].endswith(
        " in the run and 0.0.1 here: join it with the same config, versions and files"
    )


@pytest.mark.slow
def test_faults_reach_servers_that_have_joined(
    tmp_path: Path, undisturbed: list[dict[str, Any]]
) -> None:
    """The second server is killed, and then the one that has come in its place."""
    faults = (
        "kill server 1 step 0 layer 1 backward",
        "kill server 1 step 2 layer 0 forward",
        "kill new server 0 step 4 backward",
    )
    plan = Plan(waits={0: 1, 2: 2}, faults=faults)
    newcomers = Newcomer(wish=3, after=1), Newcomer(after=3)
    seen = run(tmp_path / "out", 2, newcomers=newcomers, plan=plan)
    assert check(seen, undisturbed) == [
        ("lost_servers", 3, 1),
        ("lost_servers", 3, 1),
        ("joined_servers", 3, 2),  # before the loss, in the same record
        ("lost_servers", 4, 1),
        ("joined_servers", 4, 2),
    ]
    losses = [loss for record in records(seen) for loss in record.get("lost_servers", ())]
    assert [loss["during"] for loss in losses] == ["step 0", "step 2", "step 4"]
    lines = [json.loads(line) for line in (tmp_path / "out/faults.jsonl").read_text().splitlines()]
    delivered = [(line["fault"], line["rank"]) for line in lines if "fault" in line]
    assert delivered == list(zip(faults, (3, 3, 4), strict=True))
    assert [line["step"] for line in lines if "recovery" in line] == [0, 2, 4]


@pytest.mark.slow
def test_one_that_dies_while_it_joins_changes_nothing(
    tmp_path: Path, undisturbed: list[dict[str, Any]]
) -> None:
    dying = Newcomer(death=Death(4, "regrouping", 1))
    seen = run(tmp_path / "out", 2, newcomers=[dying], plan=Plan(waits={1: 1}))
    assert check(seen, undisturbed) == []
    assert seen[4] is None
    assert [len(one["records"]) for one in seen[:4]] == [STEPS] * 4


@pytest.mark.slow
def test_one_dies_while_another_joins(tmp_path: Path, undisturbed: list[dict[str, Any]]) -> None:
    plan = Plan(waits={0: 1, 2: 1})
    seen = run(
        tmp_path / "out",
        2,
        Death(3, "regrouping", 1),
        newcomers=[Newcomer(after=1)],
        plan=plan,
    )
    lost, joined = check(seen, undisturbed)
    # The newcomer comes again, to the same change if it is quick enough.
    assert lost in (("lost_servers", 3, 1), ("lost_servers", 3, 2))
    assert joined == ("joined_servers", 4, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("servers", "settings"),
    [
        (1, ("parallel.ping_pong=true", "parallel.recompute=true", "train.eval_every=2")),
        (1, ("parallel.pp=2", "parallel.micro_batches=2")),
        (1, ("parallel.learn_speed=on", "parallel.speed=[1,1,2]")),
        (2, ("parallel.tp=2",)),
    ],
    ids=["ping-pong", "pp2", "speeds", "tp2"],
)
def test_other_meshes(tmp_path: Path, servers: int, settings: tuple[str, ...]) -> None:
    right = records(run(tmp_path / "whole", servers, settings=settings))
    seen = run(
        tmp_path / "out",
        servers,
        settings=settings,
        newcomers=[Newcomer()] * servers,
        plan=Plan(waits={1: servers}),
    )
    joined = [("joined_servers", 2 + servers + number, 2 * servers) for number in range(servers)]
    assert sorted(check(seen, right)) == joined


@pytest.mark.slow
def test_a_single_worker_that_has_lost_its_server_gets_another(tmp_path: Path) -> None:
    right = records(run(tmp_path / "whole", 1, workers=1))
    seen = run(
        tmp_path / "out",
        1,
        Death(1, "forward", 1),
        workers=1,
        newcomers=[Newcomer(wish=1)],
        plan=Plan(waits={1: 1}),
    )
    assert check(seen, right) == [("lost_servers", 1, 0), ("joined_servers", 1, 1)]
