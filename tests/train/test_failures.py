"""Runs that cannot go on, or start where they did not stop: each says so, and loses nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import disks
import pytest
from ranks import World
from train.runs import fit, fit_with_nan, save_with_nan, stop_in_evaluation, told

from distca.train.run_lock import RunLock
from distca.train.step_folders import complete, newest

TINY = {
    "model.sizes": "{layers=1, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=48}",
    "data.sources": '["fixed:64"]',
    "data.tokenizer": '"ids:61"',
    "data.context": "64",
    "data.held_out": "0.05",
    "train.tokens_per_step": "256",
    "train.steps": "4",
}


def settings(out: Path, **changes: str) -> list[str]:
    return [*(f"{name}={value}" for name, value in {**TINY, **changes}.items()), f"out={out}"]


def tell(world: World, out: Path, **changes: str) -> tuple[list[str], int]:
    """What rank 0 of one is told, and the step that it starts from."""
    sentences, first, _ = world(1).run(told, settings(out, **changes), ranks=1)[0]
    return sentences, first


def refused(world: World, out: Path, **changes: str) -> str:
    (error, _), *_ = world(1).answers(fit, settings(out, **changes), ranks=1)
    assert error is not None
    assert error.startswith("ValueError: ")
    return error.removeprefix("ValueError: ")


def steps(out: Path) -> list[int]:
    return [int(path.name[5:]) for path in complete(out / "checkpoints")]


def test_nan_on_one_rank_stops_all_and_saves_nothing(world: World, tmp_path: Path) -> None:
    every = {"train.checkpoint_every": "1"}
    answers = world(2).run(fit_with_nan, settings(tmp_path, **every), [2], ranks=2)
    for _, error, threads in answers:
        assert error == (
            "RankFailedError: step 2 has a loss of nan and a gradient norm of"
            f" {error.split('norm of ')[1].split(',')[0]}, so weights were not updated; the last"
            f" checkpoint is {tmp_path}/checkpoints/step-00000002: lower train.lr or train.clip,"
            " look at the data of this step, or set train.skip_non_finite"
        )
        assert not any(name.startswith("distca-plan") for name in threads)
    assert [record["step"] for record in answers[0][0]] == [0, 1]
    assert steps(tmp_path) == [2, 1]
    again = world(2).run(fit_with_nan, settings(tmp_path, **every), [], ranks=2)[0][0]
    assert [record["step"] for record in again] == [2, 3]


def test_steps_are_skipped_up_to_a_limit(world: World, tmp_path: Path) -> None:
    """As if they had not been; and the limit is on steps in a row."""
    few = {"train.skip_non_finite": "1", "train.steps": "6"}
    run = settings(tmp_path / "few", **few)
    records, error, _ = world(2).run(fit_with_nan, run, [1, 3], ranks=2)[0]
    assert error == ""
    assert [record["skipped"] for record in records] == [False, True, False, True, False, False]
    lines = [json.loads(line) for line in (tmp_path / "few/metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] is None for line in lines] == [line["skipped"] for line in lines]
    run = settings(tmp_path / "many", **few)
    records, error, _ = world(2).run(fit_with_nan, run, [1, 2], ranks=2)[0]
    assert [record["step"] for record in records] == [0, 1]
    assert "step 2 has a loss of nan" in error


def test_skipped_steps_do_not_replace_checkpoints(world: World, tmp_path: Path) -> None:
    saving = {"train.skip_non_finite": "2", "train.checkpoint_every": "1", "train.steps": "6"}
    run = settings(tmp_path, **saving)
    error = world(2).run(fit_with_nan, run, [2, 3, 4], ranks=2)[0][1]
    assert "step 4 has a loss of nan" in error
    assert steps(tmp_path) == [2, 1]


def test_weights_that_are_not_finite_are_not_saved(world: World, tmp_path: Path) -> None:
    error = world(1).run(save_with_nan, settings(tmp_path), ranks=1)[0]
    assert error.startswith(
        "weights are not finite after step 0, so they are not saved; there is no checkpoint: "
    )
    assert steps(tmp_path) == []


def test_documents_without_a_target_are_refused(world: World, tmp_path: Path) -> None:
    (tmp_path / "one.jsonl").write_text('{"tokens": [5]}\n' * 9)
    error = refused(world, tmp_path / "run", **{"data.sources": f'["{tmp_path}/one.jsonl"]'})
    assert error.startswith(f"the documents of {tmp_path}/one.jsonl have no target within the")
    held = {"data.held_out": "0", "train.eval_every": "2"}
    assert "no held-out documents" in refused(world, tmp_path / "run", **held)


def test_every_start_says_from_where(world: World, tmp_path: Path) -> None:
    every = {"train.checkpoint_every": "1", "train.keep": "5"}
    assert tell(world, tmp_path, **every) == ([f"starting new in {tmp_path}"], 0)
    sentences, first = tell(world, tmp_path, **every, **{"train.steps": "6"})
    assert (sentences, first) == ([f"resumed from step 4 of {tmp_path}"], 4)

    (tmp_path / "checkpoints/step-00000006/.metadata").write_bytes(b"half")
    (tmp_path / "checkpoints/step-00000005/extra.json").write_bytes(b"")
    sentences, first = tell(world, tmp_path, **every, **{"train.steps": "5"})
    assert first == 4
    assert sentences[0].endswith(": step-00000004 is used")
    assert "step-00000006/.metadata is damaged (" in sentences[0]
    assert "step-00000005/extra.json is damaged (" in sentences[1]
    assert sentences[2:] == [
        "step-00000005.aside is later, and is kept but not used",
        "step-00000006.aside is later, and is kept but not used",
        f"resumed from step 4 of {tmp_path}",
        f"2 records of later steps were moved to {tmp_path}/metrics.abandoned.jsonl",
    ]
    assert steps(tmp_path)[:2] == [5, 4]

    sentences, first = tell(world, tmp_path, **every, from_step="2", **{"train.steps": "3"})
    assert (sentences[-2], first) == (f"resumed from step 2 of {tmp_path}", 2)
    assert steps(tmp_path) == [3, 2]  # those of the abandoned branch do not win
    error = refused(world, tmp_path, from_step="9")
    assert error.endswith("checkpoints has no complete checkpoint of step 9: choose one of [2, 3]")
    assert tell(world, tmp_path, resume="false")[0][-2:] == [
        f"starting new in {tmp_path}",
        f"3 records of later steps were moved to {tmp_path}/metrics.abandoned.jsonl",
    ]
    assert steps(tmp_path) == [4]
    abandoned = (tmp_path / "metrics.abandoned.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in abandoned] == [4, 5, 2, 3, 4, 0, 1, 2]


def test_a_run_goes_on_with_the_same_model_from_a_record_that_is_whole(
    world: World, tmp_path: Path
) -> None:
    assert tell(world, tmp_path, **{"train.checkpoint_every": "2"})[1] == 0
    newest_one = tmp_path / "checkpoints" / "step-00000004"
    more = {"train.steps": "5"}
    error = refused(world, tmp_path, **more, **{"model.sizes.rope_theta": "77"})
    assert error == (
        f"{newest_one} was saved from another model, model.sizes.rope_theta is 10000.0 there and"
        " 77.0 here: use the model that it was saved from, or another folder; a new run can start"
        " from these weights, as distca export writes them, with model.path"
    )
    (newest_one / "SHA256SUMS").unlink()
    extra = json.loads((newest_one / "extra.json").read_text())
    extra["loader"]["sources"][0]["cursor"] = -1
    (newest_one / "extra.json").write_text(json.dumps(extra))
    sentences, first = tell(world, tmp_path, **more)
    assert first == 2
    assert sentences[0].startswith(f"{newest_one}/extra.json is damaged (loader.sources.cursor")
    assert sentences[0].endswith("): step-00000002 is used")


def test_a_stop_saves_and_never_evaluates(world: World, tmp_path: Path) -> None:
    often = {"train.eval_every": "1", "train.checkpoint_every": "3", "stop_after": "2"}
    records = world(1).run(fit, settings(tmp_path, **often), ranks=1)[0]
    assert ["eval_loss" in record for record in records] == [True, False]
    assert records[-1]["stopped"]
    assert steps(tmp_path) == [2]


def test_a_stop_on_one_rank_ends_an_evaluation_on_all(world: World, tmp_path: Path) -> None:
    often = {"train.eval_every": "1", "train.eval_tokens": "2560"}
    run = settings(tmp_path, **often)
    (records, first), (_, second) = world(2).run(stop_in_evaluation, run, ranks=2)
    assert (first, second) == (2, 2)
    assert [(record["step"], record["stopped"]) for record in records] == [(0, True)]
    assert "eval_loss" not in records[0]
    assert steps(tmp_path) == [1]


def test_changed_data_is_refused_with_what_changed(world: World, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    one, two = (tmp_path / "data" / name for name in ("one.txt", "two.txt"))
    one.write_text("Some text " * 40)
    two.write_text("More text " * 60)
    data = {"data.sources": f'["{tmp_path}/data"]', "data.tokenizer": "bytes", "data.held_out": "0"}
    out = tmp_path / "run"
    assert tell(world, out, **data)[1] == 0
    more = {**data, "train.steps": "6"}
    changed = f"{tmp_path}/data has changed since the checkpoint: "
    two.write_text("mORE tEXT " * 60)
    error = refused(world, out, **more)
    assert error.startswith(f"{changed}its files have the same names and sizes, but other contents")
    two.write_text("More text " * 60 + "!")
    assert refused(world, out, **more).startswith(f"{changed}it had 1000 bytes and has 1001;")
    two.write_text("More text " * 60)
    two.rename(two.with_name("three.txt"))
    assert "its files have other names" in refused(world, out, **more)
    two.with_name("three.txt").rename(two)
    assert tell(world, out, **more)[1] == 4
    assert refused(world, out, **{**more, "data.tokenizer": '"ids:300"'})


def test_a_folder_is_locked_until_its_owner_is_gone(world: World, tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from distca.train.run_lock import RunLock;"
        f" lock = RunLock(Path({str(tmp_path)!r})); print('held', flush=True); time.sleep(60)"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    owner.stdout.readline()
    error = refused(world, tmp_path)
    assert error.startswith(f"{tmp_path} is in use by process {owner.pid} on ")
    assert error.endswith(": wait for it or stop it, or use another folder")
    owner.kill()
    owner.wait()
    RunLock(tmp_path).release()
    tell(world, tmp_path)
    RunLock(tmp_path).release()  # a run that has ended holds it no longer


@pytest.mark.parametrize(
    "name", ["run.lock", "config.json", "metrics.jsonl", "metrics.new", "logs/rank-0.log"]
)
def test_a_link_in_place_of_a_file_of_the_run_is_not_followed(tmp_path: Path, name: str) -> None:
    """A folder that somebody else has made could lead to any file of the user."""
    theirs, link = tmp_path / "theirs", tmp_path / "run" / name
    link.parent.mkdir(parents=True)
    link.symlink_to(theirs)
    with pytest.raises(ValueError, match=r"^\S+ is a link: move it away, or use another folder"):
        RunLock(tmp_path / "run")
    assert not theirs.exists()
    link.unlink()
    os.mkfifo(link)
    with pytest.raises(ValueError, match=r"^\S+ is no file: move it away, or use another folder"):
        RunLock(tmp_path / "run")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with disks.small_disk(tmp_path / "disk", "420k") as place:
        yield place


def test_a_full_disk_is_told(world: World, disk: Path) -> None:
    every = {"train.checkpoint_every": "1", "train.keep": "5"}
    error = refused(world, disk, **every)
    folder = disk / "checkpoints"
    assert error.startswith(f"no space left on {folder}: a checkpoint needs about 0.000")
    assert error.endswith("use another folder; earlier checkpoints are not affected")
    found: Any = newest(folder)
    assert found is not None
    assert tell(world, disk, **{"train.steps": "1"})[1] >= 1  # it can be loaded
    (disk / "filler").write_bytes(b"x" * 4096)
    with (disk / "filler").open("ab", buffering=0) as file:
        while True:
            try:
                file.write(b"x" * 1024)
            except OSError:
                break
    assert "no space left on" in refused(world, disk, **{"train.steps": "9"})


def test_a_read_only_folder_is_told(world: World, disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    error = refused(world, disk / "run")
    assert error == (
        f"cannot open {disk}/run: read-only file system; give a path that can be read or written"
    )
