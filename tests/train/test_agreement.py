"""Ranks that were given different things refuse to start, all with the same sentence."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

from ranks import World
from train.runs import start_each, start_in

from distca.planning.costs.profile import Profile
from distca.train.agreement import MAY_DIFFER

TINY = [
    "model.sizes={layers=1, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=48}",
    "data.tokenizer=bytes",
    "data.context=64",
    "data.held_out=0",
    "train.tokens_per_step=256",
    "train.steps=3",
]
DIFFERENT = {
    "train.seed=1": "train.seed is 0 on rank 0 and 1 on rank 1",
    "train.lr=0.1": "train.lr is 0.0003 on rank 0 and 0.1 on rank 1",
    "train.clip=0.5": "train.clip is 1.0 on rank 0 and 0.5 on rank 1",
    "train.steps=4": "train.steps is 3 on rank 0 and 4 on rank 1",
    "train.checkpoint_every=2": "train.checkpoint_every is 0 on rank 0 and 2 on rank 1",
    "train.eval_every=2": "train.eval_every is 0 on rank 0 and 2 on rank 1",
    "model.sizes.hidden=64": "model.sizes.hidden is 32 on rank 0 and 64 on rank 1",
    "parallel.policy=colocated": "parallel.policy is distca on rank 0 and colocated on rank 1",
    "data.context=65": "data.context is 64 on rank 0 and 65 on rank 1",
    "resume=false": "resume is True on rank 0 and False on rank 1",
}


def test_the_documentation_names_every_key_that_may_differ() -> None:
    text = " ".join((Path(__file__).parents[2] / "docs" / "training.md").read_text().split())
    sentence = text[text.index("Only the keys in `MAY_DIFFER`") :].split(". ")[0]
    assert set(re.findall(r"`([\w.]+)`", sentence)) - {"MAY_DIFFER"} == set(MAY_DIFFER)


def test_every_difference_is_named_on_both_ranks(world: World, tmp_path: Path) -> None:
    base = [*TINY, f"out={tmp_path}"]
    starts = [[base, [*base, setting]] for setting in DIFFERENT]
    for answers in world(2).run(start_each, starts, ranks=2):
        for words, error in zip(DIFFERENT.values(), answers, strict=True):
            assert error == f"{words}: start all ranks with the same config, versions and files"


def test_what_may_differ_and_a_mistake_on_all(world: World, tmp_path: Path) -> None:
    """The folder of rank 0 is used by both."""
    places = [tmp_path / name for name in ("one", "two")]
    allowed = [
        [*TINY, f"out={place}/run", f"parallel.memory_gib={n}"] for n, place in enumerate(places, 1)
    ]
    missing = [*TINY, f"out={tmp_path}/run", f"data.sources={tmp_path}/nope.txt"]
    first, second = world(2).run(start_each, [allowed, [missing, missing]], ranks=2)
    assert first == second
    assert first[0] == ""
    assert first[1].startswith(f"{tmp_path}/nope.txt does not exist: give ")
    assert (places[0] / "run").exists()
    assert not (places[1] / "run").exists()


def test_data_with_other_contents_is_named(world: World, tmp_path: Path) -> None:
    """One path that leads to other files on each rank, as on nodes with their own disks."""
    for rank, text in enumerate(("The same name, ", "the same size; ")):
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / "text.txt").write_text(text * 50)
    settings = [*TINY, "data.sources=text.txt", f"out={tmp_path}/run"]
    first, second = world(2).run(start_in, settings, str(tmp_path), ranks=2)
    assert first == second
    assert re.match(r"data\.source 0\.contents is \w+ on rank 0 and \w+ on rank 1", first)


def test_a_profile_with_other_rates_is_named(world: World, tmp_path: Path) -> None:
    """Plans would differ sooner or later, with words about lengths and options."""
    record = Profile.read("h200").to_json()
    for rank, tflops in enumerate((100.0, 200.0)):
        (tmp_path / str(rank)).mkdir()
        text = json.dumps(record | {"linear_tflops": tflops})
        (tmp_path / str(rank) / "mine.json").write_text(text)
    settings = [*TINY, "parallel.cost=mine.json", f"out={tmp_path}/run"]
    first, second = world(2).run(start_in, settings, str(tmp_path), ranks=2)
    assert first == second
    assert re.match(r"file of parallel\.cost\.contents is \w+ on rank 0 and \w+ on rank 1", first)


def test_both_processes_end_with_2_and_one_says_why(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    ranks = [
        subprocess.Popen(
            [sys.executable, "-P", "-m", "distca", "train", f"--out={tmp_path}"]
            + [f"--set={setting}" for setting in (*TINY, f"train.seed={rank}")],
            env=os.environ
            | {
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            },
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=60)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [2, 2], said
    assert said == [
        "distca: train.seed is 0 on rank 0 and 1 on rank 1: start all ranks with the same config,"
        " versions and files\n",
        "",
    ]
