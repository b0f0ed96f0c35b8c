"""``distca train`` as people call it: in processes of its own, on one rank and on two."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distca.cli import compare, main
from distca.cli.before_start import check, check_trace
from distca.report.training import comparison, verdict
from distca.train import trainer
from distca.train.config import Config
from distca.train.run_lock import RunLock
from distca.train.step_folders import COMPLETE

COMMAND = [sys.executable, "-P", "-m", "distca"]
TINY = (
    "model.sizes={layers=1,hidden=64,heads=2,kv_heads=1,head_dim=32,ffn=64}",
    "train.tokens_per_step=512",
    "data.context=256",
    "data.overlong=drop",
)
KEYS = {
    "out", "steps", "steps_taken", "step", "loss", "tokens", "tokens_per_s", "imbalance_before",
    "imbalance_planned", "imbalance_measured", "bytes_per_step", "stopped", "metrics", "checkpoint",
}  # fmt: skip


def command(out: Path, *settings: str) -> list[str]:
    return [*COMMAND, "train", f"--out={out}", *(f"--set={s}" for s in (*TINY, *settings))]


def run(
    out: Path, *settings: str, options: tuple[str, ...] = (), status: int = 0
) -> tuple[str, str]:
    ran = subprocess.run(
        [*command(out, *settings), *options],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ran.returncode == status, ran.stdout + ran.stderr
    return ran.stdout, ran.stderr


def metrics(out: Path) -> list[dict[str, Any]]:
    """Returns the records so far; the last line may be in the middle of being written."""
    lines = (out / "metrics.jsonl").read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


@pytest.mark.slow
def test_two_ranks_with_a_checkpoint_and_then_more_steps_on_one(tmp_path: Path) -> None:
    out, err = run(tmp_path, "train.steps=3", "train.checkpoint_every=3", options=("--trace=2",))
    assert err == ""
    assert "2 on the CPU: pp 1 x dp 2 x cp 1 x tp 1" in out
    assert "3 of 512 tokens" in out
    assert "step 3/3  loss " in out
    assert f"saved in {tmp_path}/checkpoints/step-00000003" in out
    assert "GiB on a rank: state " in out
    assert f"timeline in {tmp_path}/traces/trace.json" in out
    events = json.loads((tmp_path / "traces" / "trace.json").read_text())["traceEvents"]
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {
        "rank 0",
        "rank 1",
    }
    assert "\x1b" not in out  # neither bars nor colors in a pipe
    first = metrics(tmp_path)

    printed, err = run(tmp_path, "train.steps=5", options=("--ranks=1", "--json"))
    assert err == ""
    result = json.loads(printed)
    assert result.keys() >= KEYS
    assert (result["steps_taken"], result["step"], result["stopped"]) == (2, 5, False)
    assert [record["step"] for record in metrics(tmp_path)] == [0, 1, 2, 3, 4]
    assert metrics(tmp_path)[:3] == first


@pytest.mark.slow
def test_compare_on_two_ranks(tmp_path: Path) -> None:
    out, err = run(tmp_path, "train.steps=3", options=("--compare",))
    assert err == ""
    assert "colocated and disaggregated, steps in turns" in out
    assert "The losses of all 3 steps agree (relative difference at most 0.001)." in out
    sides = [metrics(tmp_path / name) for name in ("colocated", "disaggregated")]
    for before, after in zip(*sides, strict=True):
        assert after["loss"] == pytest.approx(before["loss"], rel=1e-4)
        assert before["bytes"] == 0


def start(out: Path, *settings: str) -> subprocess.Popen[str]:
    """A run without end, that has done a step."""
    process = subprocess.Popen(
        command(out, "train.steps=1000000", *settings),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not (out / "metrics.jsonl").exists() or not metrics(out):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    return process


def children(process: subprocess.Popen[str]) -> list[int]:
    found = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    return [int(pid) for pid in found.split()]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks into /proc")
def test_a_killed_rank_ends_the_run(tmp_path: Path) -> None:
    process = start(tmp_path)
    began = time.monotonic()
    ranks = children(process)
    os.kill(ranks[1], signal.SIGKILL)
    _, err = process.communicate(timeout=30)
    assert time.monotonic() - began < 15
    assert process.returncode == 1
    assert err == (
        "distca: rank 1 was killed by SIGKILL, so all ranks were ended; its output is in"
        f" {tmp_path}/logs/rank-1.log\n"
    )
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)


def stop(out: Path, number: signal.Signals, status: int) -> int:
    """How many steps were done."""
    process = start(out)
    process.send_signal(number)
    said, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (status, "")
    done = len(metrics(out))
    assert said.splitlines()[-1] == (
        f"stopped after {done} of 1,000,000 steps: saved in {out}/checkpoints/step-{done:08d}; the"
        " same command continues from there"
    )
    return done


@pytest.mark.slow
def test_ctrl_c_saves_too(tmp_path: Path) -> None:
    stop(tmp_path, signal.SIGINT, status=130)


@pytest.mark.slow
def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    """And a second run into the folder is refused while the first one has it."""
    process = start(tmp_path)
    with pytest.raises(ValueError, match=rf"{tmp_path} is in use by process {process.pid} on "):
        RunLock(tmp_path)
    for rank in children(process):  # so that they cannot save in the meantime
        os.kill(rank, signal.SIGSTOP)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == "ended at once by a second signal: there is no checkpoint\n"
    RunLock(tmp_path).release()


def test_sigterm_before_ranks_are_started(tmp_path: Path) -> None:
    process = subprocess.Popen(command(tmp_path), stderr=subprocess.PIPE, text=True)
    mask = 1 << (signal.SIGTERM - 1)

    def is_handled() -> bool:
        status = Path(f"/proc/{process.pid}/status").read_text()
        return bool(int(status.split("SigCgt:")[1].split()[0], 16) & mask)

    while not is_handled():
        assert process.poll() is None
        time.sleep(0.01)
    process.terminate()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert err == "stopped before the next step: there was nothing new to save\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("data.sources=nope.txt", "nope.txt does not exist: give "),
        ("train.steps=-1", "train.steps = -1: it must be at least 1"),
    ],
    ids=["data", "config"],
)
def test_a_mistake_under_torchrun_is_told_once(tmp_path: Path, setting: str, words: str) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--no-python"]
    ran = subprocess.run(
        [*torchrun, *command(tmp_path, setting)], capture_output=True, text=True, timeout=100
    )
    assert ran.returncode == 1  # of torchrun; that of the ranks is 2
    assert ran.stderr.count(f"distca: {words}") == 1
    assert "exitcode  : 2" in ran.stderr
    assert f"traceback : {words}" in ran.stderr


@pytest.mark.slow
def test_a_difference_between_ranks_under_torchrun_is_told_once(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--no-python"]
    own_seed = ["bash", "-c", '"$@" --set=train.seed=$RANK', "bash"]
    ran = subprocess.run(
        [*torchrun, *own_seed, *command(tmp_path)], capture_output=True, text=True, timeout=100
    )
    words = "train.seed is 0 on rank 0 and 1 on rank 1: start all ranks with the same config"
    assert ran.stderr.count(f"distca: {words}") == 1
    assert f"traceback : {words}" in ran.stderr


@pytest.mark.slow
def test_a_mistake_that_only_ranks_see_gets_one_sentence_too(tmp_path: Path) -> None:
    settings = ("train.frozen=nope.*", "train.steps=2")
    out, err = run(tmp_path, *settings, options=("--json",), status=2)
    assert out == ""
    assert err.startswith("distca: train.frozen: 'nope.*' matches no parameter")
    assert err.count("\n") == 1


def test_sigterm_saves_and_the_next_run_goes_on(tmp_path: Path, as_rank: Any) -> None:
    """Two ranks are stopped, and one goes on."""
    done = stop(tmp_path, signal.SIGTERM, status=0)
    first = metrics(tmp_path)
    printed, _ = as_rank(tmp_path, f"--set=train.steps={done + 2}", "--json")
    result = json.loads(printed)
    assert result.keys() >= KEYS
    assert (result["steps_taken"], result["step"], result["stopped"]) == (2, done + 2, False)
    assert [record["step"] for record in metrics(tmp_path)] == [*range(done + 2)]
    assert metrics(tmp_path)[:done] == first


def test_compare_shows_a_bar_while_it_builds_its_models(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def build(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    monkeypatch.setattr(trainer, "Trainer", build)
    with pytest.raises(MemoryError):
        compare.run(Config(), "float32", as_json=False)
    assert "preparing" in capsys.readouterr().out


def test_compare_is_one_table_and_one_picture(tmp_path: Path, as_rank: Any) -> None:
    out, _ = as_rank(tmp_path, "--set=train.steps=2", "--compare")
    for words in ("tokens/s", "imbalance, planned", "imbalance, measured", "speed-up"):
        assert words in out
    assert "The losses of all 2 steps agree (relative difference at most 0.001)." in out
    assert f"records: {tmp_path}/*/metrics.jsonl, picture: {tmp_path}/compare.png" in out
    assert "to train on your own data: distca train " in out
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")
    printed, _ = as_rank(tmp_path, "--set=train.steps=2", "--compare", "--json")
    assert json.loads(printed)["losses_agree"]


def test_a_config_file_and_settings_over_it(tmp_path: Path, as_rank: Any) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        "[train]\nsteps = 2\nseed = 3\ncheckpoint_every = 2\n[parallel]\npolicy = 'colocated'\n"
    )
    run = tmp_path / "out"
    said, _ = as_rank(run, "--set=train.seed=4", str(path))
    assert "1 on the CPU: pp 1 x dp 1 x cp 1 x tp 1" in said
    assert "colocated, balanced placement" in said
    assert "step 2/2  loss " in said
    assert f"records in {run}/metrics.jsonl, saved in {run}/checkpoints/step-00000002" in said
    saved = json.loads((run / "config.json").read_text())
    assert (saved["train"]["steps"], saved["train"]["seed"]) == (2, 4)
    assert saved["parallel"]["policy"] == "colocated"

    again, _ = as_rank(run, "--set=train.seed=4", str(path))
    assert "all 2 steps are done already" in again
    anew, _ = as_rank(run, "--set=train.seed=4", "--fresh", "--json", str(path))
    assert json.loads(anew)["steps_taken"] == 2


def test_a_rank_says_what_is_wrong(tmp_path: Path, as_rank: Any) -> None:
    _, err = as_rank(tmp_path, "--set=train.frozen=nope.*", status=2)
    assert err.startswith("distca: train.frozen: 'nope.*' matches no parameter")
    _, err = as_rank(tmp_path, "--ranks=2", status=2)
    assert err == "distca: --ranks 2, but 1 ranks were started: leave out --ranks\n"


def test_losses_that_differ_are_said_to() -> None:
    record = {"step": 0, "loss": 2.0, "tokens": 8, "tokens_per_s": 4.0, "seconds": 2.0, "bytes": 0}
    record |= dict.fromkeys(("imbalance_before", "imbalance_planned", "imbalance_measured"), 1.0)
    record |= {"exposed_s": 0.0, "stopped": False}
    for other, agree in ((2.001, True), (2.01, False), (float("nan"), False)):
        compared = comparison([record], [record | {"loss": other}], 1e-3)
        assert compared["losses_agree"] is agree
        assert ("do NOT agree" in verdict(compared)) is not agree


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Any:
    """What is said before anything is started."""

    def call(*args: str) -> str:
        with pytest.raises(SystemExit) as exited:
            main(["train", f"--out={tmp_path}/out", *args])
        out, err = capsys.readouterr()
        assert (exited.value.code, out) == (2, "")
        assert err.startswith("distca: ")
        assert err.count("\n") == 1
        assert not (tmp_path / "out").exists()
        return err

    return call


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("train.stepps=3", "train.stepps is unknown: did you mean steps?"),
        ("trian.steps=3", "trian is unknown: did you mean train?"),
        ("parallel.zzz=1", "parallel.zzz is unknown: choose one of dp, cp"),
        ("train.steps=0", "train.steps = 0: it must be at least 1"),
        ("train.keep=0", "train.keep = 0: it must be at least 1"),
        ("train.steps=many", "train.steps = 'many': it must be a whole number"),
        ("train.lr=-1", "train.lr = -1.0: it must be at least 0"),
        ("train.lr=1e-5", "train.min_lr = 3e-05 is above train.lr = 1e-05, which falls to it"),
        ("train", "--set train: write it as section.name=value"),
        ("data.overlong=cut", "data.overlong = 'cut' is unknown: choose split or drop"),
        ("data.context=65536", "is below 1 x data.context = 65536"),
        ("parallel.micro_batches=9", "is below 9 x data.context"),
        ("data.tokenizer=nope", "nope"),
        ("model.name=nope", "model 'nope' is unknown: choose one of debug"),
        ("model.sizes={depth=3}", "model.sizes.depth is unknown: choose one of vocab_size"),
        ("model.sizes={layer=3}", "model.sizes.layer is unknown: did you mean layers?"),
        ("model.sizes=3", "model.sizes = 3: it must be a section with names and values"),
        ("model.sizes={heads=3}", "3 heads over 4 kv heads"),
        ("parallel.placement=x", "parallel.placement = 'x' is unknown"),
        ("parallel.policy=x", "policy 'x' is unknown: choose one of distca"),
        ("parallel.dp=3", "pp 1 x dp 3 x cp 1 x tp 1 and 0 servers need 3 ranks, but 2 were"),
        ("parallel.servers=2", "2 ranks less 2 servers cannot be divided by pp x cp x tp = 1"),
        ("parallel.stage_layers=[1,3]", "layer counts [1, 3] are 2 but there are 1 stages"),
        ("parallel.pp=3", "2 ranks less 0 servers cannot be divided by pp x cp x tp = 3"),
        ("parallel.tp=3", "cannot be divided by pp x cp x tp = 3"),
        ("parallel.backend=x", "attention backend 'x' is unknown"),
        ("parallel.compile=true", "compile = true works on GPUs only"),
        ("parallel.memory_gib=0.001", "this run needs about"),
        ("parallel.cost=x", "cost"),
        ("data.sources=nope.txt", "nope.txt does not exist: give stdlib, a text,"),
        ("data.sources=[]", "no sources: give one or more"),
        ("data.held_out=2e9", "held_out"),
        ("data.weights=-1", "data.weights = [-1.0]: each must be at least 0"),
        ("data.weights=0", "stdlib has weight 0.0: it must be above 0"),
        ("model.path=nope", "nope/config.json does not exist"),
        ("train.frozen=nope.*", "train.frozen: 'nope.*' matches no parameter"),
        ("train.lr=inf", "train.lr = inf: it must be at most 1000000.0"),
        ("train.lr=nan", "train.lr = nan: it must be at least 0"),
        ("train.betas=[0.9,1.5]", "train.betas = [0.9, 1.5]: each must be below 1"),
        ("parallel.speed=[1,2,3]", "speed"),
        ("parallel.tolerance=-1", "tolerance"),
        ("parallel.attention_memory_gib=1e-6", "memory"),
        ("train.seed=-1", "train.seed = -1: it must be at least 0"),
        ("from_step=3", "out/checkpoints has no complete checkpoint of step 3: it has none at all"),
    ],
)
def test_wrong_settings_get_one_sentence(refused: Any, setting: str, said: str) -> None:
    assert said in refused("--ranks=2", f"--set={setting}")


def test_two_halves_that_cannot_be_packed_are_refused(refused: Any) -> None:
    """Each must hold a document of full length, whatever the batch."""
    settings = ("data.context=3072", "train.tokens_per_step=4096", "parallel.ping_pong=true")
    said = refused(*(f"--set={setting}" for setting in settings))
    assert "4096 is below 2 x data.context = 6144" in said
    assert "in each of its 2 micro-batches or halves" in said


def test_wrong_options_get_one_sentence(refused: Any, tmp_path: Path) -> None:
    bad = tmp_path / "bad.toml"
    bad.write_text("[train\n")
    assert "bad.toml is not TOML" in refused(str(bad))
    bad.write_text("[train]\nstep = 3\n")
    assert "bad.toml: train.step is unknown: did you mean steps?" in refused(str(bad))
    assert "cannot open nope.toml" in refused("nope.toml")
    assert "0 ranks: start 1 or more" in refused("--ranks=0")
    assert "--compare starts both sides from step 0" in refused("--compare", "--resume")
    assert "--nope" in refused("--nope")


def test_a_step_that_never_comes_cannot_be_traced(refused: Any, tmp_path: Path) -> None:
    said = refused("--trace=3", "--set=train.steps=3")
    assert "train.trace = 3 of train.steps = 3" in said
    assert "choose one from 0 to 2" in said
    config = Config.read(None, [f"out={tmp_path}", "train.steps=9", "train.trace=2"])
    check_trace(config)
    saved = tmp_path / "checkpoints" / "step-00000004"
    saved.mkdir(parents=True)
    (saved / COMPLETE).touch()
    with pytest.raises(ValueError, match=r"continues from step 4 .* choose a step from 4 to 8"):
        check_trace(config)
    check_trace(replace(config, resume=False))
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces" / "trace.json").touch()
    check_trace(config)  # the same command continues a run that was stopped after the trace


def test_another_model_or_other_data_is_refused_before_ranks_are_started(
    tmp_path: Path, as_rank: Any
) -> None:
    as_rank(tmp_path, "--set=train.steps=2", "--set=data.held_out=4")
    settings = [*TINY, f"out={tmp_path}", "train.steps=3", "data.held_out=4"]

    def check_with(*changes: str) -> None:
        check(Config.read(None, [*settings, *changes]), 1, 1, share_gpu=False)

    check_with()
    check_with("data.context=128", "train.seed=1", "resume=false")
    check_with("data.context=128", "model.sizes.context=128")
    for change, said in (
        ("train.seed=1", "has seed = 0 but this run has 1: set the same value, or"),
        ("data.held_out=5", "has held_out = 4.0 but this run has 5.0"),
        ("data.add_eos=false", "stdlib has changed since the checkpoint: its first document has"),
        ("model.sizes.window=16", "model.sizes.window is None there and 16 here: use"),
        ("model.sizes.ffn=32", "model.sizes.ffn is 64 there and 32 here: use the model"),
        ("from_step=1", "no complete checkpoint of step 1: choose one of [2]"),
    ):
        with pytest.raises(ValueError, match=re.escape(said)):
            check_with(change)
    (tmp_path / "checkpoints" / "step-00000002" / "extra.json").write_text("{}")
    check_with("train.seed=1")  # damaged, and there is none before: the ranks say so
    with pytest.raises(ValueError, match=r"extra\.json is damaged \(its digest"):
        check_with("from_step=2")


def test_help_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    said = capsys.readouterr().out
    for option in ("--set", "--ranks", "--out", "--fresh", "--compare", "--json"):
        assert option in said


@pytest.mark.slow
def test_under_torchrun_nothing_is_launched(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--no-python"]
    ran = subprocess.run(
        [*torchrun, *command(tmp_path, "train.steps=2", "parallel.ping_pong=true"), "--compare"],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=100,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("The losses of all 2 steps agree") == 1
    assert ran.stdout.count("2 on the CPU") == 1
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--from=-1", "--from -1: give the step of a checkpoint, 0 or more"),
        ("--set=.=1", "--set .=1: write it as section.name=value"),
        ("--set=train.=1", "--set train.=1: write it as section.name=value"),
    ],
)
def test_options_without_a_meaning(
    option: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["train", f"--out={tmp_path}", option])
    assert capsys.readouterr().err == f"distca: {words}\n"


@pytest.mark.parametrize("columns", ["40", "60"])
def test_help_loses_nothing_in_a_narrow_terminal(columns: str) -> None:
    shown = subprocess.run(
        [*COMMAND, "train", "--help"],
        env=os.environ | {"COLUMNS": columns},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "…" not in shown
    assert "--server-restarts" in shown
