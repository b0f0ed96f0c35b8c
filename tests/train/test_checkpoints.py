"""What is saved on one mesh is what another loads, and a kill at any moment loses nothing."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import pickle
import random
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from quick import others_slow
from ranks import RankFailedError, World
from runtime.bodies import TINY
from train.bodies import (
    Command,
    Run,
    State,
    change_after_save,
    fail_to_write,
    load,
    load_newest,
    resume,
    save_after,
    save_extra,
    save_forever,
    save_steps,
    save_steps_of,
    weight_decays,
)

from distca.pipeline.mesh import MeshShape
from distca.train.step_folders import newest

DP2, TP2, BOTH = MeshShape(dp=2), MeshShape(tp=2), MeshShape(dp=2, tp=2)
MESHES: dict[str, dict[str, Any]] = {
    "unsharded": {"sharded": False},
    "alone": {},
    "dp2": {"parallel": DP2},
    "tp2": {"parallel": TP2},
    "dp2 x tp2": {"parallel": BOTH},
}
FROZEN = ("seams.0.*", "seams.2.after.norm.weight")


def assert_equal(found: State, right: State) -> None:
    assert found.keys() == right.keys()
    for name, tensor in right.items():
        assert torch.equal(found[name], tensor), name


def run_all(world: World, body: Any, run: Run, *args: Any) -> Any:
    """The first rank's answer, which is that of all."""
    size = run.parallel.num_ranks
    return world(size).run(body, run, *args, ranks=size)[0]


@pytest.fixture(scope="module")
def saved(world: World, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, State, State]:
    """A folder with step 2 of a run at dp2, its state, and the state one step later."""
    folder = tmp_path_factory.mktemp("saved")
    return folder, *run_all(world, save_after, Run(folder, DP2, frozen=FROZEN), 2)


@pytest.mark.parametrize("mesh", others_slow(MESHES, quick={"unsharded", "dp2", "tp2"}))
def test_any_mesh_goes_on_from_what_dp2_saved(
    world: World, saved: tuple[Path, State, State], mesh: str
) -> None:
    folder, before, after = saved
    run = Run(folder, frozen=FROZEN, **MESHES[mesh])
    loaded, extra, then = run_all(world, load_newest, run)
    assert extra == {"step": 2, "loader": {"cursor": [1, 2]}}
    assert_equal(loaded, before)
    assert_equal(then, after)
    assert "seams.1.after.wo.weight exp_avg" in loaded
    assert "seams.0.embed.weight exp_avg" not in loaded


@pytest.mark.parametrize("mesh", others_slow(["unsharded", "dp2 x tp2"], quick={"unsharded"}))
def test_dp2_goes_on_from_what_other_meshes_saved(world: World, tmp_path: Path, mesh: str) -> None:
    before, after = run_all(world, save_after, Run(tmp_path, **MESHES[mesh]), 1)
    loaded, _, then = run_all(world, load_newest, Run(tmp_path, DP2))
    assert_equal(loaded, before)
    assert_equal(then, after)


def test_stages_save_and_load_their_layers(world: World, tmp_path: Path) -> None:
    run = Run(tmp_path, MeshShape(pp=2))
    answers = world(2).run(save_after, run, 2, ranks=2)
    before, after = ({**first, **last} for first, last in zip(*answers, strict=True))
    loaded, _, then = run_all(world, load_newest, Run(tmp_path))
    assert_equal(loaded, before)
    assert_equal(then, after)
    (first, _, _), (last, _, _) = world(2).run(load_newest, run, ranks=2)
    assert_equal({**first, **last}, before)
    assert not first.keys() & last.keys()


def test_tied_embeddings(world: World, tmp_path: Path) -> None:
    tied = replace(TINY, tied=True)
    before, after = run_all(world, save_after, Run(tmp_path, DP2, tied), 2)
    loaded, _, then = run_all(world, load_newest, Run(tmp_path, config=tied, sharded=False))
    assert_equal(loaded, before)
    assert_equal(then, after)


def test_before_the_first_step_there_are_no_moments(world: World, tmp_path: Path) -> None:
    before, after = run_all(world, save_after, Run(tmp_path, DP2), 0)
    assert not any("exp_avg" in name for name in before)
    loaded, _, then = run_all(world, load_newest, Run(tmp_path))
    assert_equal(loaded, before)
    assert_equal(then, after)
    assert then["seams.0.embed.weight step"] == 1


def test_decay_is_that_of_the_configuration(world: World, saved: tuple[Path, State, State]) -> None:
    run = Run(saved[0], frozen=FROZEN, weight_decay=0.7)
    assert run_all(world, weight_decays, run, "step-00000002") == [0.7, 0.0]


@pytest.mark.parametrize("mesh", ["unsharded", "dp2"])
def test_what_changes_right_after_save_is_not_saved(
    world: World, tmp_path: Path, mesh: str
) -> None:
    run = Run(tmp_path, keep=3, **MESHES[mesh])
    run_all(world, change_after_save, run)
    for _ in range(3):
        assert_consistent(world, run)
        (tmp_path / newest_name(run) / ".metadata").unlink()
    assert newest(tmp_path) is None


def newest_name(run: Run) -> str:
    path = newest(run.folder)
    assert path is not None
    return path.name


def assert_consistent(world: World, run: Run) -> int:
    """The newest has one number everywhere, that of its step; which is returned."""
    name = newest_name(run)
    loaded, extra, _ = run_all(world, load_newest, replace(run, parallel=MeshShape()))
    assert name == f"step-{extra['step']:08d}"
    assert sum(tensor.numel() for tensor in loaded.values()) > 40_000
    for what, tensor in loaded.items():
        assert torch.all(tensor == extra["step"]), what
    return int(extra["step"])


def test_the_last_ones_are_kept(world: World, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    steps = ["step-00000005", "step-00000010", "step-00000015", "step-00000020"]
    assert run_all(world, save_steps, Run(tmp_path, DP2), [5, 10, 15, 20]) == [
        ["notes", *steps[:1]],
        ["notes", *steps[:2]],
        ["notes", *steps[1:3]],
        ["notes", *steps[2:]],
    ]


def test_a_run_that_goes_back_sets_later_ones_aside(world: World, tmp_path: Path) -> None:
    """Its checkpoints have lower steps, and one is replaced."""
    run_all(world, save_steps, Run(tmp_path), [10, 20, 30])
    run_all(world, save_steps, Run(tmp_path), [15, 20, 20])
    assert newest_name(Run(tmp_path)) == "step-00000020"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-00000020",
        "step-00000020.aside",
        "step-00000020.replaced",
        "step-00000030.aside",
    ]


def test_the_newest_is_that_of_the_highest_step_after_a_copy(world: World, tmp_path: Path) -> None:
    run_all(world, save_steps, Run(tmp_path), [1, 3])
    for path in (tmp_path / "step-00000001").iterdir():
        path.touch()
    os.utime(tmp_path / "step-00000003" / ".metadata", (0, 0))
    assert newest_name(Run(tmp_path)) == "step-00000003"


def test_a_replaced_one_counts_until_the_new_one_is_complete(world: World, tmp_path: Path) -> None:
    run = Run(tmp_path, DP2, keep=1)
    run_all(world, save_steps, run, [7])
    run_all(world, fail_to_write, run, 7)
    assert newest_name(run) == "step-00000007.replaced"
    assert run_all(world, load, run, "step-00000007.replaced") == {"step": 7}
    run_all(world, save_steps, run, [7])
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000007"]


def test_an_incomplete_folder_is_passed_over_and_removed_later(
    world: World, tmp_path: Path
) -> None:
    run = Run(tmp_path, DP2)
    assert newest(tmp_path) is None
    run_all(world, save_steps, run, [3])
    torn = tmp_path / "step-00000009"
    torn.mkdir()
    (torn / "__0_0.distcp").write_bytes(b"half of it")
    assert newest_name(run) == "step-00000003"
    with pytest.raises(RankFailedError, match=r"incomplete checkpoint.*newest.*step-00000003"):
        run_all(world, load, run, "step-00000009")
    run_all(world, save_steps, run, [4])
    assert not torn.exists()


def test_a_rank_that_cannot_write_fails_the_save_on_all(world: World, tmp_path: Path) -> None:
    run = Run(tmp_path, DP2)
    run_all(world, save_steps, run, [3])
    for words, found in world(2).run(fail_to_write, run, 4, ranks=2):
        assert "step-00000004 is incomplete (the cable is out)" in words
        assert found.endswith("step-00000003")
    for words, found in world(2).run(fail_to_write, run, 5, "finish", 0, ranks=2):
        assert "step-00000005 is complete, but its save failed (the cable is out)" in words
        assert found.endswith("step-00000005")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"config": replace(TINY, ffn=64)},
            r"seams\.1\.after\.ffn\.w1\.weight is \[48, 32\] there",
        ),
        (
            {"config": replace(TINY, layers=2)},
            r"another model, 13 .*seams\.2\.before.*missing here",
        ),
        (
            {"config": replace(TINY, qk_norm=True)},
            r"q_norm\.weight is missing there and \[8\] here",
        ),
        ({"frozen": ()}, r"no optimizer state of .* \(seams\.0\.embed\.weight, .*freeze them"),
    ],
    ids=["widths", "layers", "norms", "frozen"],
)
def test_another_model_is_refused_on_all_ranks(
    world: World, saved: tuple[Path, State, State], change: dict[str, Any], words: str
) -> None:
    run = replace(Run(saved[0], DP2, frozen=FROZEN), **change)
    for error, _ in world(2).answers(load, run, "step-00000002", ranks=2):
        assert error is not None
        assert error.startswith("ValueError")
        with pytest.raises(ValueError, match=words):
            raise ValueError(error)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("extra.json", b'{"step": 3', r"extra\.json is damaged \(Expecting"),
        ("extra.json", b"[3]", r"extra\.json is damaged \(not a JSON object\)"),
        (".metadata", b"?", r"\.metadata is damaged \("),
        (".metadata", b"", r"\.metadata is damaged \(it is not the JSON"),
        (
            ".metadata",
            pickle.dumps(Command(Path("executed"))),
            r"\.metadata is damaged \(it is not the JSON",
        ),
        ("__1_0.distcp", b"", r"step-00000003 is damaged \(\w+"),
    ],
    ids=["torn extra", "wrong extra", "metadata", "empty", "crafted", "tensors"],
)
def test_damage_is_said_in_a_sentence(
    world: World, tmp_path: Path, file: str, content: bytes, words: str
) -> None:
    """Without digests, by the first rank, as a mistake; a resumed run takes the one before."""
    run = Run(tmp_path, DP2)
    run_all(world, save_steps, run, [2, 3])
    for sums in tmp_path.glob("*/SHA256SUMS"):
        sums.unlink()
    (tmp_path / "step-00000003" / file).write_bytes(content)
    (error, _), _ = world(2).answers(load, run, "step-00000003", ranks=2)
    assert error is not None
    assert error.startswith("DamagedCheckpointError")
    assert re.search(rf"{words}.*: load an earlier checkpoint", error)
    path, notes = run_all(world, resume, run)
    assert path == tmp_path / "step-00000002"
    assert re.search(rf"{words}.*: step-00000002 is used", notes[0])
    with pytest.raises(RankFailedError, match="is damaged"):
        run_all(world, resume, run, 3)
    (tmp_path / "step-00000002" / file).write_bytes(content)
    with pytest.raises(RankFailedError, match=r"ValueError: no checkpoint can be loaded \(.*fresh"):
        run_all(world, resume, run)
    assert not Path("executed").exists()


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        (
            "optimizer.seams.1.after.wo.weight.exp_avg",
            r"the moments of seams\.1\.after\.wo\.weight",
        ),
        ("model.seams.1.after.wo.weight", r"seams\.1\.after\.wo\.weight is missing there and \["),
    ],
)
def test_a_tensor_that_is_missing_is_damage(
    world: World, tmp_path: Path, missing: str, words: str
) -> None:
    """Of a weight, if the checkpoint says that it is from this model."""
    run = Run(tmp_path)
    run_all(world, save_steps_of, run, [2, 3])
    for sums in tmp_path.glob("*/SHA256SUMS"):
        sums.unlink()
    file = tmp_path / "step-00000003" / ".metadata"
    saved = json.loads(file.read_text())
    del saved[missing]
    file.write_text(json.dumps(saved))
    path, notes = run_all(world, resume, run)
    assert path == tmp_path / "step-00000002"
    assert re.search(rf"\.metadata is damaged \({words}.*: step-00000002 is used", notes[0])


def test_one_flipped_bit_or_a_missing_digest_is_damage(world: World, tmp_path: Path) -> None:
    run, newer = Run(tmp_path, DP2), tmp_path / "step-00000003"
    run_all(world, save_steps, run, [2, 3])
    for file in sorted(newer.iterdir()):
        content = file.read_bytes()
        flipped = bytearray(content)
        flipped[len(content) // 2] ^= 1
        file.write_bytes(flipped)
        path, notes = run_all(world, resume, run)
        assert path == tmp_path / "step-00000002", file
        assert re.search(r"is damaged \(its digest is not .*: step-00000002 is used", notes[0])
        file.write_bytes(content)
    assert run_all(world, resume, run) == (newer, [])
    sums = newer / "SHA256SUMS"
    lines = sums.read_text().splitlines(keepends=True)
    for left in ([], lines[1:], lines[:-1]):
        sums.write_text("".join(left))
        path, notes = run_all(world, resume, run)
        assert path == tmp_path / "step-00000002"
        assert re.search(r"SHA256SUMS is damaged \(it has no digest of .*: step-0+2 is", notes[0])
    sums.unlink()
    path, notes = run_all(world, resume, run)
    assert notes == [f"{newer} has no SHA256SUMS, so its files could not be checked for damage"]


def test_what_cannot_be_saved_or_found(world: World, tmp_path: Path) -> None:
    with pytest.raises(RankFailedError, match="step-00000001 does not exist: choose another one"):
        run_all(world, load, Run(tmp_path, DP2), "step-00000001")
    with pytest.raises(RankFailedError, match=r"extra of step 1 is not JSON .*use numbers"):
        run_all(world, save_extra, Run(tmp_path, DP2), {"tensor": torch.ones(1)})
    (tmp_path / "file").write_text("")
    for error, _ in world(2).answers(save_extra, Run(tmp_path / "file", DP2), {}, ranks=2):
        assert error is not None
        assert "cannot be written" in error


def words(store: str) -> str:
    return "\n".join(Path(f"{store}-{rank}.txt").read_text() for rank in range(2))


def kill_in_a_loop(world: World, folder: Path, kills: int, seed: int) -> None:
    """Two ranks save without a pause; at a random moment one or both are killed, again and again.

    Each time the newest must be of one step throughout, and no older than any seen before.
    """
    context, chance = mp.get_context("forkserver"), random.Random(seed)
    run, last = Run(folder / "checkpoints", DP2), 0
    for number in range(kills):
        store = str(folder / f"store-{number}")
        ranks = [
            context.Process(target=save_forever, args=(rank, 2, store, run), daemon=True)
            for rank in range(2)
        ]
        for rank in ranks:
            rank.start()
        deadline = time.monotonic() + 60
        while (found := newest(run.folder)) is None or int(found.name[5:]) <= last:
            assert all(rank.is_alive() for rank in ranks), words(store)
            assert time.monotonic() < deadline, words(store)
            time.sleep(0.002)
        time.sleep(chance.uniform(0.0, 0.2))
        victims = [ranks[number % 2]] if number % 3 else ranks
        for rank in victims:
            rank.kill()
        for rank in ranks:  # one that is left sees that the other is gone
            rank.join(30)
            assert rank.exitcode, f"it should end with an error\n{words(store)}"
        step = assert_consistent(world, run)
        assert step > last
        last = step


def test_a_kill_during_a_save(world: World, tmp_path: Path) -> None:
    kill_in_a_loop(world, tmp_path, kills=2, seed=0)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_many_kills_during_saves(world: World, tmp_path: Path) -> None:
    kill_in_a_loop(world, tmp_path, kills=15, seed=1)
