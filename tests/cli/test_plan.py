"""``distca plan`` as people and machines call it: every option, every error, every width."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distca.cli import main
from distca.cli.records import record_of, summary_of, traffic_matrix
from distca.cli.sources import parse_bytes, parse_tokens, read_placement
from distca.planning.api import place_and_plan, plan
from distca.planning.costs.choice import cost_model
from distca.planning.plan import Plan
from distca.planning.policies import POLICIES

KEYS = {
    "servers", "tokens", "tasks", "imbalance_before", "imbalance", "bytes_total", "bytes_send_max",
    "bytes_recv_max", "bytes_backward", "bytes_lower_bound", "plan_s", "layout_s",
}  # fmt: skip


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory with one good file of ranks."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "ok.json").write_text('{"ranks": [[65536], [8192, 8192], [4096]]}')
    return tmp_path


@pytest.fixture
def run(here: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*args: str | Path, status: int = 0) -> tuple[str, str]:
        with pytest.raises(SystemExit) as exited:
            main([*map(str, args)])
        out, err = capsys.readouterr()
        assert exited.value.code == status, err
        return out, err

    return call


def refused(run: Any, *args: str | Path) -> str:
    out, err = run(*args, status=2)
    assert out == ""
    assert err.startswith("distca: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err
    return err


@pytest.mark.parametrize("columns", [40, 60, 80, 140])
def test_the_table_and_the_bars_fit_the_terminal(
    run: Any, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for args in (["pretrain", "--ranks", "24", "--context", "16K"], ["ok.json", "--compare"]):
        out, err = run("plan", *args)
        assert err == ""
        assert "\x1b" not in out  # no colors in a pipe
        assert "…" not in out
        assert max(map(len, out.splitlines())) <= columns


def test_a_terminal_of_unknown_width_is_80_columns_wide(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, _ = (text.split("time to plan") for text in run("plan", "ok.json"))
    monkeypatch.setenv("COLUMNS", "0")
    after, _ = (text.split("time to plan") for text in run("plan", "ok.json"))
    assert len(before) == len(after) == 2
    assert before[0] == after[0]


def test_people_are_told_before_and_after(run: Any) -> None:
    out, _ = run("plan", "ok.json")
    assert "86,016 tokens in 4 documents on 3 ranks" in out
    assert "imbalance, forward" in out
    assert "█" in out
    assert "not met" not in out


def test_a_missed_bound_is_said_and_is_no_error(run: Any, here: Path) -> None:
    (here / "short.json").write_text('{"ranks": [[300], [1]]}')
    out, _ = run("plan", "short.json")
    assert "The bound of 1.02 x mean is not met: " in out


def test_json_is_one_object(run: Any) -> None:
    out, err = run("plan", "ok.json", "--json")
    assert err == ""
    assert out.count("\n") == 1
    summary = json.loads(out)
    assert summary.keys() >= KEYS
    assert summary["imbalance"] <= 1.02


def test_out_can_be_loaded_back(run: Any) -> None:
    printed, _ = run("plan", "ok.json", "--out", "plan.json", "--json")
    loaded = Plan.load("plan.json")
    expected = plan([[65536], [8192, 8192], [4096]], model="llama3-8b")
    assert loaded.fingerprint == expected.fingerprint
    assert json.loads(Path("plan.json").read_text())["summary"] == json.loads(printed)
    timeless = [p.to_json() for p in (loaded, expected)]
    for data in timeless:
        del data["summary"]["plan_s"]
    assert timeless[0] == timeless[1]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--policy", "greedy"), {"policy": "greedy"}),
        (("--placement", "balanced"), {"policy": "distca, balanced placement"}),
        (("--tolerance", "0.1"), {"tolerance": 0.1}),
        (("--cost", "pairs"), {"cost": "pairs"}),
        (("--cost", "analytic"), {"cost": "analytic"}),
        ((), {"cost": "h200"}),
        (("--model", "llama-34b"), {}),
        (("--heads", "8", "--kv-heads", "2", "--head-dim", "64"), {}),
        (("--servers", "2"), {"ranks": 5, "servers": 2}),
        (("--servers", "2", "--workers-serve"), {"ranks": 5, "servers": 5}),
        (("--ranks-per-node", "1"), {}),
        (("--memory", "40GB"), {"meets_bound": True}),
        (("--cp", "3", "--policy", "wlb"), {"policy": "wlb"}),
        (("--mask", "window:1024"), {}),
        (("--tile", "256", "--min-shard", "512"), {}),
    ],
)
def test_options_reach_the_plan(
    run: Any, options: tuple[str, ...], expected: dict[str, Any]
) -> None:
    summary = json.loads(run("plan", "ok.json", "--json", *options)[0])
    assert summary.keys() >= KEYS
    assert summary.items() >= expected.items()


def test_shards_of_documents_that_span_ranks(run: Any, here: Path) -> None:
    shards = [[{"document": 7, "start": 4096 * i, "stop": 4096 * (i + 1)}] for i in range(2)]
    (here / "spans.json").write_text(json.dumps({"ranks": shards}))
    summary = json.loads(run("plan", "spans.json", "--json")[0])
    assert (summary["documents"], summary["tokens"]) == (1, 8192)


def test_files_and_distributions_are_packed_over_ranks(run: Any, here: Path) -> None:
    (here / "list.json").write_text("[1000, 3000, 500]")
    (here / "text").mkdir()
    (here / "text" / "a.txt").write_text("x" * 600)
    np.save("tokens.npy", np.array([5, 5, 0, 5, 0] * 100))
    for source, more, tokens, documents in (
        ("list.json", (), 4500, 3),
        ("list.json", ("--context", "1K"), 2048, 2),
        ("text", (), 600, 1),
        ("tokens.npy", ("--end-of-document", "0"), 500, 200),
        ("fixed:512", ("--context", "4K", "--seed", "3"), 8192, 16),
    ):
        out, _ = run("plan", source, "--ranks", "2", "--json", *more)
        summary = json.loads(out)
        assert (summary["tokens"], summary["documents"]) == (tokens, documents)


def test_the_seed_draws_the_batch() -> None:
    drawn = [read_placement("prolong", ranks=2, seed=seed).lengths.tolist() for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_compare_has_every_policy(run: Any) -> None:
    names = ["distca", "distca, balanced placement", *[p for p in POLICIES if p != "distca"]]
    out, _ = run("plan", "ok.json", "--compare", "--json")
    policies = json.loads(out)["policies"]
    assert [row["policy"] for row in policies] == names
    assert all(row.keys() >= KEYS for row in policies)


def test_compare_says_why_a_policy_does_not_apply(run: Any) -> None:
    out, _ = run("plan", "ok.json", "--compare", "--servers", "1")
    assert "policy greedy supports only in-place servers of equal speed" in out
    rows = json.loads(run("plan", "ok.json", "--compare", "--servers", "1", "--json")[0])
    assert {row["policy"] for row in rows["policies"] if "error" in row} >= {"greedy", "colocated"}


@pytest.mark.parametrize("policy", POLICIES)
def test_the_traffic_matrix_adds_up(policy: str) -> None:
    given = read_placement("pretrain", ranks=6, context="8K")
    made = place_and_plan(given, POLICIES[policy], model="llama3-8b")
    matrix = traffic_matrix(made)
    np.testing.assert_array_equal(matrix.sum(1), made.traffic.send)
    np.testing.assert_array_equal(matrix.sum(0), made.traffic.recv)


def test_the_record_agrees_with_the_plan() -> None:
    given = read_placement("pretrain", ranks=6, context="8K")
    made = plan(given, model="llama3-8b", servers=2, workers_serve=True)
    record = record_of(made, given, cost_model(made.cost, made.shape), summary_of(made))
    assert max(record["before"]["imbalance_each"]) == made.imbalance_before
    assert max(record["after"]["imbalance_each"]) == made.imbalance
    assert record["load_before"].shape == record["load_after"].shape == (2, 8)
    assert record["load_before"].max() == pytest.approx(made.imbalance_before)
    assert record["load_after"].max() == pytest.approx(made.imbalance)


@pytest.mark.parametrize("ranks", [1, 8, 40])
def test_plot_draws_a_picture(run: Any, ranks: int) -> None:
    out, _ = run("plan", "pretrain", "--ranks", ranks, "--context", "4K", "--plot", "p.png")
    assert "written: p.png" in out
    assert Path("p.png").read_bytes().startswith(b"\x89PNG")


BAD_FILES = {
    "{": "is not JSON",
    "3": "holds no lengths: write",
    '{"x": 1}': "holds no lengths: write",
    '{"ranks": 3}': "must be a list with one list of documents per rank",
    '{"ranks": [3]}': "must be a list with one list of documents per rank",
    '{"ranks": []}': "no ranks at all",
    '{"ranks": [[], []]}': "holds no documents: it needs one or more",
    '{"ranks": [[5, -1]]}': "entry 1 of rank 0 is a document of -1 tokens: it needs >= 1",
    '{"ranks": [[0]]}': "is a document of 0 tokens: it needs >= 1",
    '{"ranks": [["a"]]}': "is 'a': it must be a whole number of tokens",
    '{"ranks": [[1.5]]}': "is 1.5: it must be a whole number of tokens",
    '{"ranks": [[null]]}': "is None: it must be a whole number of tokens",
    '{"ranks": [[{"document": 0}]]}': "a shard has document, start and stop",
    '{"ranks": [[{"document": 0, "start": 1, "stop": 2}]]}': "are placed nowhere",
    '{"ranks": [[100000000000000000000]]}': "a document has fewer than",
    "[5, 0]": "has 0 tokens",
    "[5]": "add --ranks N",
}


@pytest.mark.parametrize("content", BAD_FILES)
def test_bad_files_get_one_sentence(run: Any, here: Path, content: str) -> None:
    (here / "bad.json").write_text(content)
    assert BAD_FILES[content] in refused(run, "plan", "bad.json")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ("nope.json", "nope.json does not exist: give"),
        ("nope --ranks 2", "a folder of .txt files, a glob, or a distribution: pretrain, prolong"),
        ("nope* --ranks 2", "a folder of .txt files, a glob, or a distribution: pretrain, prolong"),
        ("pretrain", "add --ranks N"),
        ("ok.json --ranks 2", "leave out --ranks"),
        ("pretrain --ranks 0", "--ranks 0: "),
        ("pretrain --ranks two", "'--ranks'"),
        ("pretrain --ranks 2 --seed -1", "--seed -1: "),
        ("pretrain --ranks 2 --context 12Q", "'12Q' is not a number of tokens: write"),
        ("fixed:0 --ranks 2", "fixed:0 with a context of 131072 tokens"),
        ("lognormal:1 --ranks 2", "length distribution 'lognormal:1' is unknown"),
        ("ok.json --model x", "model 'x' is unknown: choose one of"),
        ("ok.json --heads 3", "give model, or heads, kv_heads and head_dim"),
        ("ok.json --model llama3-8b --heads 3", "both given"),
        ("ok.json --policy x", "policy 'x' is unknown: choose one of"),
        ("ok.json --placement x", "placement 'x' is unknown: choose given or balanced"),
        ("ok.json --policy wlb --placement balanced", "places tokens itself"),
        ("ok.json --mask x", "mask 'x' is unknown: use causal"),
        ("ok.json --cost x", "cost 'x' is unknown: use pairs"),
        ("ok.json --cost ok.json", "the profile is not usable"),
        ("ok.json --tolerance nan", "tolerance = nan: it must be"),
        ("ok.json --tolerance lots", "'--tolerance'"),
        ("ok.json --memory 1MB", "give it fewer tokens or more memory"),
        ("ok.json --memory lots", "'lots' is not a number of bytes: write 1 or"),
        ("ok.json --servers -1", "servers = -1: it must be a whole number from 0 to 1048576"),
        ("ok.json --servers 1 --policy colocated", "some workers do not serve"),
        ("ok.json --ranks-per-node 0", "ranks_per_node = 0: it must be a whole number from 1 to"),
        ("ok.json --policy wlb --cp 2", "cp = 2 does not divide 3 workers"),
        ("ok.json --tile 0", "tile = 0"),
        ("ok.json --min-shard 0", "min_shard = 0"),
        ("ok.json --compare --out plan.json", "leave out --policy, --placement, --out and --plot"),
        ("ok.json --compare --model x", "model 'x' is unknown"),
        (
            "ok.json --out no/plan.json",
            "no/plan.json cannot be written: there is no folder no; create it",
        ),
        ("ok.json --out .", "cannot open .: is a directory"),
        ("ok.json --plot no/plan.png", "there is no folder no; create it"),
        ("ok.json --plot plan.xyz", "--plot plan.xyz: give a file that ends in .png, .svg, .pdf"),
        ("ok.json --nope", "--nope"),
        ("", "LENGTHS"),
    ],
)
def test_bad_input_gets_one_sentence(run: Any, args: str, said: str) -> None:
    assert said in refused(run, "plan", *args.split())


def test_a_bug_keeps_its_traceback(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distca.planning.api.plan", lambda *_, **__: [][0])
    with pytest.raises(IndexError):
        main(["plan", "ok.json"])


def test_an_interrupt_is_quiet(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("distca.planning.api.plan", interrupt)
    out, err = run("plan", "ok.json", status=130)
    assert (out + err).strip() == ""


def test_units_of_tokens_and_bytes() -> None:
    tokens = {"64K": 65536, "128k": 131072, "1M": 1 << 20, "1.5K": 1536, "77": 77}
    assert [*map(parse_tokens, tokens)] == [*tokens.values()]
    sizes = {"40GB": 40 * 10**9, "40 GiB": 40 << 30, "512mb": 512 * 10**6, "9B": 9}
    assert [*map(parse_bytes, sizes)] == [*sizes.values()]


@pytest.mark.parametrize("args", [["--help"], ["plan", "--help"], ["--version"], []])
def test_help_is_light(args: list[str]) -> None:
    """What takes time to import is not imported; a clock would blame a busy machine on us."""
    code = (
        "import sys; from distca.cli import main\n"
        f"try: main({args})\n"
        "finally: sys.stderr.write(' '.join(sys.modules))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "distca" in ran.stdout
    assert {"torch", "matplotlib", "numpy"}.isdisjoint(ran.stderr.split())
