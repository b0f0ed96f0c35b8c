"""``distca simulate`` as people and machines call it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distca.cli import main
from distca.cli.scenarios import Study
from distca.cli.settings import Settings
from distca.cli.simulate import SimulateCommand
from distca.cli.sources import parse_bandwidth, parse_bytes
from distca.report.simulation import simulation_table, verdict_text
from distca.report.simulation_plots import draw_simulation

SMALL = (
    "--layers=2", "--hidden=1024", "--ffn=4096", "--heads=8", "--kv-heads=4", "--vocab-size=8192",
    "--gpus=4", "--gpus-per-node=2", "--tp=1", "--batches=1", "--context=64K", "--sequences=4",
    "--tolerance=0.1",
)  # fmt: skip
EXAMPLE = Path(__file__).parents[2] / "examples" / "simulate.toml"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def call(*args: str | Path, status: int = 0) -> tuple[str, str]:
        with pytest.raises(SystemExit) as exited:
            main(["simulate", *map(str, args)])
        out, err = capsys.readouterr()
        assert exited.value.code == status, err
        return out, err

    return call


@pytest.fixture(scope="module")
def small() -> dict[str, Any]:
    """One record, for all that is shown of it."""
    import contextlib
    import io

    out = io.StringIO()
    with pytest.raises(SystemExit), contextlib.redirect_stdout(out):
        main(["simulate", *SMALL, "--json"])
    record: dict[str, Any] = json.loads(out.getvalue())
    return record


def test_people_see_a_table_and_a_verdict(run: Any) -> None:
    out, err = run(*SMALL)
    assert all("simulated" in line for line in err.splitlines())  # progress, if it takes long
    assert "\x1b" not in out  # no colors in a pipe
    assert "heads 8" in out.splitlines()[0]
    for name in ("colocated", "wlb", "distca, given", "distca, balanced"):
        assert f"\n{name} " in out
    assert "\nhead-tail-cp " not in out  # with cp 1
    assert "head-tail-cp: same sizes and figures as colocated" in out
    assert "as fast as" in out
    assert max(map(len, out.splitlines())) <= 80


def test_people_see_how_a_cluster_deviates_from_an_ideal_one(run: Any) -> None:
    options = ("--jitter=0.05", "--transfer-sms=0.25", "--slow=1=0.5", "--policy=wlb")
    assert (
        "\ndeviations: kernels vary by 5%, transfers occupy 25% of the SMs, GPU 1 at 0.5 x"
        in run(*SMALL, *options)[0]
    )


@pytest.mark.parametrize(("factor", "is_shown"), [(1.0, False), (1.001, True)])
def test_a_policy_that_repeats_another_is_left_out(
    small: dict[str, Any], factor: float, is_shown: bool
) -> None:
    from rich.console import Console

    (run,) = small["runs"]
    first = run["strategies"][0]
    again = {**first, "policy": "again", "step_s": first["step_s"] * factor}
    console = Console(width=80)
    with console.capture() as shown:
        console.print(simulation_table([{**run, "strategies": [*run["strategies"], again]}], 80))
    assert ("\nagain " in shown.get()) == is_shown
    assert ("again: same sizes and figures as colocated" in shown.get()) != is_shown


@pytest.mark.parametrize("columns", [60, 80, 140])
def test_the_table_fits_the_terminal(small: dict[str, Any], columns: int) -> None:
    from rich.console import Console

    console = Console(width=columns)
    with console.capture() as shown:
        console.print(simulation_table(small["runs"] * 2, columns))
    lines = shown.get().splitlines()
    assert max(map(len, lines)) <= columns
    assert "…" not in shown.get()
    assert "GPUs" in lines[1]
    for wide in ("exposed", "tokens/s"):
        assert (wide in shown.get()) == (columns > {"exposed": 60, "tokens/s": 80}[wide])


def test_only_columns_that_fit_are_explained(run: Any) -> None:
    """Over several steps the columns are more."""
    out = run(*SMALL, "--batches=2", "--gpus=4,8", "--policy=wlb")[0]
    assert "over" in out
    assert "idle: fraction of all GPUs' time" in out
    assert "exposed" not in out.split("Disaggregation")[0]


def test_json_has_strategies_sizes_summaries_and_the_verdict(small: dict[str, Any]) -> None:
    assert small["model"]["layers"] == 2
    assert small["cluster"]["gpus"] == 4
    (only,) = small["runs"]
    assert (only["gpus"], only["sequences"], only["tokens"]) == (4, 4, 4 * 65536)
    assert [way["policy"] for way in only["strategies"]] == [
        "colocated", "kk", "head-tail-cp", "wlb", "dynamic-cp", "distca, given", "distca, balanced",
    ]  # fmt: skip
    for way in only["strategies"]:
        assert way["fits"]
        assert way["step_s"] > 0
        assert way["tokens_per_s"] == pytest.approx(only["tokens"] / way["step_s"])
        sizes = way["sizes"]
        assert sizes["pp"] * sizes["dp"] * sizes["cp"] * sizes["tp"] == 4
        assert way["memory_gib"]["total"] * 2**30 == pytest.approx(way["memory_bytes"])
    said = only["verdict"]
    best = max(way["speed_up"] for way in only["strategies"] if way["disaggregated"])
    assert said["speed_up"] == best
    assert said["ours"]["policy"].startswith("distca")
    assert said["text"] == verdict_text(only)


def test_several_numbers_of_gpus_keep_the_tokens_of_each(run: Any) -> None:
    args = (*SMALL, "--gpus=2,4", "--sequences=2", "--policy=colocated", "--policy=wlb")
    out, _ = run(*args, "--json")
    record = json.loads(out)
    assert [(one["gpus"], one["sequences"]) for one in record["runs"]] == [(2, 2), (4, 4)]
    out, _ = run(*args, "--plot=scaling.png")
    assert "2, 4 GPUs" in out
    assert Path("scaling.png").stat().st_size > 10000


def test_a_picture_shows_what_does_not_fit_too(small: dict[str, Any], tmp_path: Path) -> None:
    (only,) = small["runs"]
    ways = [way | {"fits": number > 0} for number, way in enumerate(only["strategies"])]
    refused = {"policy": "greedy, given", "error": "it cannot run"}
    record = small | {"runs": [only | {"strategies": [*ways, refused]}]}
    for suffix in ("png", "svg"):
        draw_simulation(record, tmp_path / f"picture.{suffix}")
    text = (tmp_path / "picture.svg").read_text()
    assert "svg" in text
    assert (tmp_path / "picture.png").stat().st_size > 10000


def test_the_trace_has_both_sides(run: Any) -> None:
    out, _ = run(
        *SMALL, "--policy=wlb", "--policy=distca", "--placement=given", "--trace=step.json"
    )
    assert "written: step.json" in out
    events = json.loads(Path("step.json").read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert {name.split(":")[0] for name in names} == {"distca, given", "wlb"}


def test_options_go_over_a_file_and_a_file_over_defaults(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[SimulateCommand] = []
    monkeypatch.setattr(SimulateCommand, "run", lambda self: commands.append(self))
    Path("flat.toml").write_text(
        'model = "llama-34b"\ngpus = [16, 32]\ncontext = 65536\nslow = ["3=0.5"]\n'
        "ping_pong = false\ntolerance = 0\n"
    )
    run("flat.toml", "--context=32K")
    (settings,) = commands
    assert (settings.model, settings.gpus, settings.context) == ("llama-34b", "16,32", "32K")
    assert (settings.slow, settings.ping_pong, settings.seed) == (["3=0.5"], False, "0")
    study = Study.of(settings)
    assert [one.cluster.gpus for one in study.scenarios] == [16, 32]
    assert [one.sequences for one in study.scenarios] == [16, 32]  # 32K tokens a GPU
    assert study.scenarios[0].cluster.slow == {3: 0.5}
    assert {one.name for one in study.strategies if one.disaggregated} == {
        "distca, given, no ping-pong", "distca, balanced, no ping-pong",
    }  # fmt: skip


def test_all_numbers_of_a_cluster_can_be_given() -> None:
    settings = Settings(
        gpus_per_node=4, memory="80GB", inside="200GB/s", across="12.5GB", latency=50.0,
        profile="h200-flash", jitter=0.1, link_jitter=0.2, transfer_sms=0.25, slow=["1=0.5"],
        unknown_speeds=True,
    )  # fmt: skip
    machines = Study.of(settings).scenarios[0].cluster
    assert (machines.gpus, machines.gpus_per_node, machines.memory_bytes) == (64, 4, 80 * 10**9)
    assert (machines.inside.bytes_per_s, machines.across.bytes_per_s) == (200e9, 12.5e9)
    assert machines.across.latency_s == pytest.approx(50e-6)
    assert (machines.profile, machines.jitter, machines.link_jitter) == ("h200-flash", 0.1, 0.2)
    assert machines.transfer_sms == 0.25
    assert machines.known is False


def test_the_example_runs(run: Any) -> None:
    out, _ = run(EXAMPLE, "--batches=1", "--json")
    record = json.loads(out)
    assert record["cluster"]["across"]["bytes_per_s"] == 25e9
    assert [way["policy"] for way in record["runs"][0]["strategies"]] == [
        "colocated", "wlb", "distca, balanced",
    ]  # fmt: skip


def test_documents_come_from_files_too(run: Any) -> None:
    np.save("lengths.npy", np.full(64, 8192))
    out, _ = run(*SMALL, "--lengths=lengths.npy", "--policy=wlb", "--json")
    assert json.loads(out)["lengths"] == "64 documents"


def test_a_sweep_tries_more_and_keeps_to_the_memory(run: Any) -> None:
    args = (*SMALL, "--tp=1,2", "--policy=wlb", "--json", "--memory")
    roomy, tight = (
        json.loads(run(*args, memory, "--sweep")[0])["runs"][0]["strategies"][0]
        for memory in ("141GB", "3.5GB")
    )
    assert tight["fits"]
    assert tight["memory_bytes"] <= 0.95 * 3.5e9 < roomy["memory_bytes"]
    assert tight["step_s"] >= roomy["step_s"]


def test_what_does_not_fit_is_said(run: Any) -> None:
    out, _ = run(*SMALL, "--memory=1GB", "--policy=wlb", "--policy=distca", "--placement=given")
    assert "no sizes fit into 950 MB" in out
    assert "Nothing fits into 950 MB: the smallest need is" in " ".join(out.split())


def test_a_policy_that_cannot_run_says_why_beside_the_others(run: Any) -> None:
    out, _ = run(*SMALL, "--sequences=2", "--policy=colocated", "--policy=wlb")
    assert "colocated: 4 GPUs and 2 sequences do not divide by" in out


def test_several_seeds_of_given_documents_are_refused(run: Any, tmp_path: Path) -> None:
    """They would be the same batches, whose spread would seem to be known better than it is."""
    (tmp_path / "lengths.json").write_text(json.dumps([4096] * 64))
    refused_with = refused(run, *SMALL, f"--lengths={tmp_path}/lengths.json", "--seed=0,1")
    assert "--seed 0,1: all seeds have the same batches of given documents" in refused_with


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"gain": "faster"}, "distca is 1.30 x as fast as the best of the others (wlb, dp 8)"),
        ({"gain": "even"}, "distca is 1.30 x as fast as wlb, dp 8, within the noise of 0.31."),
        ({"because": "noise"}, "The batches differ too much to tell: simulate more of them"),
        ({"because": "attention"}, "Attention is only 6.0% of the work at this context."),
        ({"because": "even"}, "the busiest worker of wlb has 1.03 x the mean."),
        ({"because": "links"}, "faster links between nodes would help the others as much."),
        (
            {"because": "links", "needed_bytes_per_s": 2e10},
            "from about 20.0 GB/s (160 Gb/s) between nodes",
        ),
        ({"because": "slow"}, "whose speeds the planner does not know."),
        ({"because": "slow", "known": True}, "for whose linear layers all others wait."),
        ({"because": "little"}, "wlb computes 95% of the time, so little is left to gain."),
        ({"because": "idle"}, "It idles 2.0% of the time too"),
        (
            {"because": "little", "enough": {"policy": "kk", "busiest": 1.031}},
            "Your documents balance to within 3.1% without moving anything: use kk.",
        ),
        (
            {"gain": "even", "enough": {"policy": "kk", "busiest": 1.0}},
            "Your documents balance to within 0.1% without moving anything: use kk.",
        ),
    ],
)
def test_verdicts_are_plain_sentences(said: dict[str, Any], words: str) -> None:
    record = {
        "gain": "slower", "speed_up": 1.3, "noise": 0.31, "because": "",
        "attention": 0.06, "busiest": 1.03, "enough": None,
        "needed_bytes_per_s": None, "known": False,
        "ours": {"policy": "distca", "sizes": "cp 8", "idle": 0.02, "exposed": 0.01},
        "other": {"policy": "wlb", "sizes": "dp 8", "idle": 0.05, "exposed": 0.0},
    }  # fmt: skip
    sentence = verdict_text({"verdict": record | said})
    assert words in sentence
    assert sentence.startswith("Disaggregation does not help here: ") == ("gain" not in said)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("polciy = 'wlb'", "bad.toml: polciy is unknown: did you mean policy?"),
        ("[cluster]\ncontext = 4", "bad.toml: cluster.context: it belongs in [data]"),
        ("[clutser]\ngpus = 4", "bad.toml: [clutser] is unknown: did you mean cluster?"),
        ("tolerance = 'x'", "bad.toml: tolerance = 'x': it must be a number"),
        ("sweep = 1", "bad.toml: sweep = 1: it must be true or false"),
        ("batches = 2.5", "bad.toml: batches = 2.5: it must be a whole number"),
        ("model = true", "bad.toml: model = True: it must be text"),
        ("gpus = [8", "distca: bad.toml is not TOML"),
    ],
)
def test_mistakes_in_a_file_are_one_sentence(run: Any, text: str, words: str) -> None:
    Path("bad.toml").write_text(text)
    assert words in refused(run, "bad.toml")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["none.toml"], "cannot open none.toml"),
        (["--model=x"], "model 'x' is unknown: choose one of llama3-8b"),
        (["--cluster=x"], "cluster 'x' is unknown"),
        (["--gpus=x"], "--gpus x: write a whole number, or several as 2,4,8"),
        (["--gpus=0"], "--gpus 0: give a number from 1 to 65,536"),
        (["--gpus=99999999999"], "--gpus 1e+11: give a number from 1 to 65,536"),
        (["--batches=1000000"], "--batches 1e+06: give a number from 1 to 10,000"),
        (["--tp=3"], "64 GPUs and 16 sequences do not divide by tp 3, pp 1"),
        (["--memory=x"], "'x' is not a number of bytes"),
        (["--across=x"], "--across: 'x' is not a bandwidth: write a number above 0"),
        (["--latency=-1"], "--latency -1: give a number from 0 to"),
        (["--profile=x"], "profile 'x' does not exist: give h200, h200-flash, a file"),
        (["--jitter=2"], "jitter = 2.0: it must be at least 0 and below 1"),
        (["--transfer-sms=1"], "transfer_sms = 1.0: it must be at least 0 and below 1"),
        (["--slow=3"], "--slow 3: write the GPU's number and its speed"),
        (["--slow=99=1"], "GPU 99 of speed 1.0: give a number below 64"),
        (["--lengths=x"], "x does not exist"),
        (["--lengths=fixed:x"], "length distribution 'fixed:x' is unknown"),
        (["--context=x"], "'x' is not a number of tokens"),
        (["--sequences=0"], "sequences = 0: give 1 or more"),
        (["--sequences=3", "--gpus=64,96"], "3 sequences on 64 GPUs are 4.5 on 96"),
        (["--batches=0"], "--batches 0: give a number from 1 to"),
        (["--sequences=99999999999"], "--sequences 1e+11: give a number from 1 to 1,048,576"),
        (["--gpus-per-node=99999999999999999999"], "--gpus-per-node 1e+20: give a number from 1"),
        (["--seed=-1"], "--seed -1: give a number from 0 to"),
        (["--mask=x"], "mask 'x' is unknown"),
        (["--policy=x"], "policy 'x' is unknown"),
        (["--placement=x"], "placement 'x' is unknown: choose given or balanced"),
        (["--tolerance=1"], "tolerance = 1.0: it must be at least 0 and less than 1"),
        (["--micro-batches=0"], "micro_batches = 0: give 1 or more"),
        (["--layers=0"], "--layers 0: give a number from 1 to"),
        (["--plot=none/x.png"], "there is no folder none"),
        (["--plot=x.txt"], "--plot x.txt: give a file that ends in .png, .svg, .pdf"),
        (["--nonsense"], "No such option"),
    ],
)
def test_mistakes_are_one_sentence(run: Any, args: list[str], words: str) -> None:
    assert words in refused(run, *args)


def refused(run: Any, *args: str) -> str:
    out, err = run(*args, status=2)
    assert out == ""
    assert err.startswith("distca: ")
    assert err.count("\n") == 1
    return str(err)


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("50GB", 50e9),
        ("50GB/s", 50e9),
        ("50 GBps", 50e9),
        ("400Gb", 50e9),
        ("400Gb/s", 50e9),
        ("400Gbit/s", 50e9),
        ("400Gbps", 50e9),
        ("1Tb/s", 125e9),
        ("1GiB/s", 2.0**30),
        ("50000000000B", 50e9),
        ("1 KiBps", 1024.0),
        ("8kbit/s", 1000.0),
    ],
)
def test_bits_and_bytes_are_told_apart(text: str, bytes_per_s: float) -> None:
    assert parse_bandwidth(text) == bytes_per_s


@pytest.mark.parametrize(
    "text", ["50gb", "gbps", "-1GB", "50GX/s", "50GB/h", "400", "400G", "0Gb", "9" * 400 + "GB"]
)
def test_what_may_be_bits_or_bytes_is_refused(text: str) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        parse_bandwidth(text)
    assert str(raised.value) == (
        f"'{text}' is not a bandwidth: write a number above 0 with its unit, in bits, as in 400Gb,"
        " or in bytes, as in 50GB"
    )


@pytest.mark.parametrize("text", ["80Gb", "80", "0GB"])
def test_memory_is_in_bytes(text: str) -> None:
    with pytest.raises(ValueError, match=f"'{text}' is not a number of bytes: write 1 or more wit"):
        parse_bytes(text)


def test_several_seeds_are_drawn_together_and_the_spread_is_shown(run: Any) -> None:
    out, _ = run(*SMALL, "--policy=colocated", "--policy=distca", "--placement=given",
                 "--batches=2", "--seed=0,1", "--json")  # fmt: skip
    record = json.loads(out)
    assert record["seeds"] == [0, 1]
    for strategy in record["runs"][0]["strategies"]:
        assert len(strategy["batch_speed_ups"]) == 4
    out, _ = run(*SMALL, "--policy=colocated", "--batches=2", "--seed=0,1")
    assert "mean of 4 steps of 2 seeds" in " ".join(out.split())
    assert "1.00-1.00" in out
