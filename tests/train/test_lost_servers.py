"""Dedicated servers are killed at any moment of a run, which goes on as if they had not been."""

from __future__ import annotations

import multiprocessing as mp
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from ranks import PRELOADED
from train import dying_servers
from train.dying_servers import Death, Newcomer, Plan

WORKERS, STEPS = 2, 5
SETTINGS = [
    "model.sizes={layers=2,hidden=32,heads=2,kv_heads=2,head_dim=16,ffn=32}",
    'data.sources=["lognormal:120:1.6"]',
    'data.tokenizer="ids:61"',
    "data.context=256",
    "data.held_out=0.05",
    "train.tokens_per_step=1024",
    f"train.steps={STEPS}",
    "train.eval_every=3",
    "train.eval_tokens=1024",
    "train.checkpoint_every=2",
]


def run(
    out: Path,
    servers: int,
    *deaths: Death,
    settings: tuple[str, ...] = (),
    workers: int = WORKERS,
    newcomers: Sequence[Newcomer] = (),
    plan: Plan | None = None,
) -> list[Any]:
    """What each rank and then each newcomer has seen; None if it was killed."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    out.mkdir(exist_ok=True)
    (out / "store").unlink(missing_ok=True)  # of a run that this one continues
    all_settings = [*SETTINGS, f"out={out}", f"parallel.servers={servers}", *settings]
    size, pipes, processes = workers + servers, [], []

    def start(body: Any, *args: Any) -> None:
        ours, theirs = context.Pipe(duplex=False)
        processes.append(context.Process(target=body, args=(theirs, *args)))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)

    for rank in range(size):
        where = rank, size, out, all_settings
        start(dying_servers.run, *where, list(deaths), plan or Plan())
    for newcomer in newcomers:
        start(dying_servers.join, out, newcomer)
    seen: list[Any] = []
    hanging = {death.rank for death in deaths if death.how == "hangs"}
    try:
        for number, pipe in enumerate(pipes):
            if number in hanging:
                seen.append(None)
                continue
            assert pipe.poll(100), f"rank {number} hangs"
            try:
                seen.append(pipe.recv())
            except EOFError:
                seen.append(None)
    finally:
        for number, process in enumerate(processes):
            process.join(0 if number in hanging else 5)
            process.kill()
    return seen


def records(seen: list[dict[str, Any] | None]) -> list[dict[str, Any]]:
    assert seen[0] is not None
    assert seen[0]["error"] == ""
    return seen[0]["records"]


def check(
    seen: list[dict[str, Any] | None], right: list[dict[str, Any]], *dead: int
) -> list[dict[str, Any]]:
    """Compares the run of all ranks that are left; returns what it has recorded of losses."""
    left = [one for rank, one in enumerate(seen) if rank not in dead]
    for one in left:
        assert one is not None
        assert one["error"] == ""
        assert [record["step"] for record in one["records"]] == list(range(STEPS))
        for found, expected in zip(one["records"], right, strict=True):
            for name in {"loss", "grad_norm", "eval_loss"} & expected.keys():
                assert found[name] == pytest.approx(expected[name], rel=1e-6), name
    first = left[0]
    assert first is not None
    losses = [loss for record in first["records"] for loss in record.get("lost_servers", ())]
    assert sorted(loss["rank"] for loss in losses) == sorted(dead)
    assert all(loss["seconds"] > 0 for loss in losses)
    told = [words for words in first["told"] if "a dedicated server, was lost in" in words]
    assert len(told) == len(dead)
    return losses


@pytest.mark.skipif(not dying_servers.FILES.exists(), reason="counts open files")
def test_all_die_one_after_another(tmp_path: Path, undisturbed: list[dict[str, Any]]) -> None:
    deaths = Death(3, "forward", 3), Death(2, "evaluation", 1), Death(4, "backward", 9)
    seen = run(tmp_path / "out", 3, *deaths)
    losses = check(seen, undisturbed, 2, 3, 4)
    found = [(loss["rank"], loss["during"], loss["servers"]) for loss in losses]
    assert found == [(3, "step 1", 2), (2, "an evaluation", 1), (4, "step 3", 0)]
    for one in filter(None, seen):
        before, *_, after = one["files"]
        assert after < before  # the connections of old groups are closed


@pytest.mark.slow
def test_all_die_at_once(tmp_path: Path, undisturbed: list[dict[str, Any]]) -> None:
    seen = run(tmp_path / "out", 2, Death(2, "start", 3), Death(3, "start", 3))
    losses = check(seen, undisturbed, 2, 3)
    assert [(loss["during"], loss["servers"]) for loss in losses] == [("step 2", 0)] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "number", "during"),
    [
        ("start", 1, "step 0"),
        ("forward", 6, "step 2"),
        ("backward", 5, "step 2"),
        ("record", 3, "the record of a step"),
        ("record", STEPS, "the record of a step"),
        ("evaluation", 2, "an evaluation"),
        ("checkpoint", 2, "a checkpoint"),
    ],
)
def test_one_of_two_dies(
    tmp_path: Path, undisturbed: list[dict[str, Any]], moment: str, number: int, during: str
) -> None:
    seen = run(tmp_path / "out", 2, Death(2, moment, number))
    (loss,) = check(seen, undisturbed, 2)
    assert (loss["during"], loss["servers"]) == (during, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "words"),
    [("no memory", "no memory"), ("a mistake", "a mistake"), ("no disk", "input/output error")],
)
def test_one_of_two_fails_with_an_error(
    tmp_path: Path, undisturbed: list[dict[str, Any]], how: str, words: str
) -> None:
    seen = run(tmp_path / "out", 2, Death(3, "backward", 5, how))
    (loss,) = check(seen, undisturbed, 3)
    assert loss["how"].startswith(f"it failed: {words}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("servers", "death", "settings"),
    [
        (2, Death(2, "backward", 5), ("parallel.ping_pong=true", "parallel.recompute=true")),
        (2, Death(3, "forward", 5), ("parallel.pp=2", "parallel.micro_batches=2")),
        (1, Death(2, "forward", 5), ("parallel.learn_speed=on", "parallel.speed=[1,1,2]")),
    ],
    ids=["ping-pong", "pp2", "speeds"],
)
def test_other_meshes(
    tmp_path: Path, servers: int, death: Death, settings: tuple[str, ...]
) -> None:
    right = records(run(tmp_path / "whole", servers, settings=settings))
    check(run(tmp_path / "out", servers, death, settings=settings), right, death.rank)


@pytest.mark.slow
def test_servers_of_other_tensor_parallel_indices_end_with_it(tmp_path: Path) -> None:
    settings = ("parallel.tp=2",)
    right = records(run(tmp_path / "whole", 2, settings=settings))
    seen = run(tmp_path / "out", 2, Death(3, "backward", 5), settings=settings)
    assert seen[2] is not None
    assert (seen[2]["error"], len(seen[2]["records"])) == ("", 2)  # it ends in the third step
    seen[2] = seen[0]
    (loss,) = check(seen, right, 3)
    assert loss["servers"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["regrouping", "regrouped"])
def test_one_more_dies_while_the_others_regroup(
    tmp_path: Path, undisturbed: list[dict[str, Any]], moment: str
) -> None:
    """They abandon connections to it that never come."""
    seen = run(tmp_path / "out", 3, Death(2, "forward", 3), Death(4, moment, 1))
    losses = check(seen, undisturbed, 2, 4)
    assert [loss["servers"] for loss in losses] == [1, 1]


@pytest.mark.slow
def test_one_that_hangs_is_lost(tmp_path: Path, undisturbed: list[dict[str, Any]]) -> None:
    plan = Plan(silent_s=3)
    seen = run(tmp_path / "out", 2, Death(3, "backward", 3, "hangs"), plan=plan)
    (loss,) = check(seen, undisturbed, 3)
    assert loss["how"] == "it has not answered for 3 s"


@pytest.mark.slow
@pytest.mark.parametrize("asked", [(0,), (1, 2), (0, 1, 2)], ids=str)
def test_a_request_to_stop_while_a_loss_is_handled(
    tmp_path: Path, undisturbed: list[dict[str, Any]], asked: tuple[int, ...]
) -> None:
    """All ranks take the step again, save and end, whichever of them gets the signal."""
    stops = [Death(rank, "regrouping", 1, "is asked to stop") for rank in asked]
    seen = run(tmp_path / "out", 2, Death(3, "forward", 3), *stops)
    assert [one and one["error"] for one in seen] == ["", "", "", None]
    found = records(seen)
    assert [record["step"] for record in found] == [0, 1]
    assert (found[1]["stopped"], len(found[1]["lost_servers"])) == (True, 1)
    continues(tmp_path / "out", undisturbed, 2)


@pytest.mark.slow
@pytest.mark.parametrize(("moment", "number"), [("start", 6), ("regrouping", 1)])
def test_a_lost_worker_ends_it_with_a_sentence(
    tmp_path: Path, undisturbed: list[dict[str, Any]], moment: str, number: int
) -> None:
    """While the loss of a server is handled, or in the step that is taken again after it."""
    seen = run(tmp_path / "out", 2, Death(2, "start", 5), Death(1, moment, number))
    assert seen == [None] * len(seen)
    for rank in (0, 3):
        words = "distca: rank 1 is lost (its process ended without a word), so this"
        assert (tmp_path / "out" / f"err-{rank}").read_text().startswith(words)
    continues(tmp_path / "out", undisturbed, 2, 4)  # that of step 4 may not be complete


def continues(out: Path, right: list[dict[str, Any]], *possible: int) -> None:
    """Checks that a run continues from a checkpoint, with the same numbers."""
    found = records(run(out, 2))
    first = found[0]["step"]
    assert first in possible
    assert [record["step"] for record in found] == list(range(first, STEPS))
    assert [record["loss"] for record in found] == pytest.approx(
        [record["loss"] for record in right[first:]], rel=1e-6
    )
