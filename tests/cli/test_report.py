"""``distca report``: what it accepts, what it refuses, and that its pages need nothing else."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from report_records import write_run

from distca.cli import main
from distca.report.pages import page

pytest.importorskip("plotly")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    monkeypatch.chdir(tmp_path)

    def call(*args: str | Path, status: int = 0) -> tuple[str, str]:
        with pytest.raises(SystemExit) as exited:
            main(["report", *map(str, args)])
        out, err = capsys.readouterr()
        assert exited.value.code == status, err
        return out, err

    return call


def records_in(page: Path) -> dict[str, Any]:
    """What a page draws."""
    found = re.search(
        r'<script type="application/json" id="page">(.*?)</script>', page.read_text(), re.DOTALL
    )
    assert found is not None
    return json.loads(found[1])


def without_scripts(page: Path) -> str:
    return re.sub(r"<script>.*?</script>", "", page.read_text(), flags=re.DOTALL)


def assert_is_self_contained(page: Path) -> None:
    """No element may load anything. The library is ours to inline, so its own text is left out."""
    text = without_scripts(page)
    assert "<script src" not in text
    assert not re.search(r"""(src|href|action)\s*=\s*["']?(https?:)?//""", text)
    assert not re.search(r"@import|url\(", text)
    assert "default-src 'none'" in text  # the browser enforces it too


def test_a_run_becomes_one_file_in_its_folder(run: Any) -> None:
    folder = write_run(Path("runs/mine"), 10)
    out, _ = run(folder)
    assert out == "written: runs/mine/report.html\n"
    file = folder / "report.html"
    assert_is_self_contained(file)
    assert records_in(file)["title"] == "runs/mine"
    assert "Plotly" in file.read_text()


def test_two_runs_and_the_sides_of_a_comparison(run: Any) -> None:
    write_run(Path("a/x"), 4)
    write_run(Path("a/y"), 4)
    run("a/x", "a/y", "--out", "both.html")
    assert records_in(Path("both.html"))["title"] == "x and y"
    write_run(Path("sides/colocated"), 4)
    write_run(Path("sides/disaggregated"), 4)
    run("sides")
    assert records_in(Path("sides/report.html"))["title"] == "colocated and disaggregated"


def test_a_plan_becomes_a_page_beside_it(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    Path("ranks.json").write_text('{"ranks": [[65536], [8192, 8192], [4096]]}')
    with pytest.raises(SystemExit):
        main(["plan", "ranks.json", "--placement", "balanced", "--out", "plan.json"])
    capsys.readouterr()
    assert run("plan.json")[0] == "written: plan.html\n"
    assert_is_self_contained(Path("plan.html"))
    pieces, load, *_ = records_in(Path("plan.html"))["sections"]
    assert pieces["view"]["lengths"] == [65536, 8192, 8192, 4096]
    before = load["figure"]["data"][0]["y"]
    assert max(before) > 2  # as given, and not as placed
    plan = json.loads(Path("plan.json").read_text())
    plan["tasks"][0]["q"] = "x"
    Path("plan.json").write_text(json.dumps(plan))
    assert "distca: plan.json: tasks has entries" in run("plan.json", status=2)[1]
    plan["tasks"].clear()
    del plan["devices"]
    Path("plan.json").write_text(json.dumps(plan))
    assert "not a plan" in run("plan.json", status=2)[1]


def test_without_plotly_the_way_out_is_named(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    page._plotly.cache_clear()
    assert "pip install 'distca[report]'" in run(write_run(Path("a"), 4), status=2)[1]


def test_json_says_what_was_written(run: Any) -> None:
    write_run(Path("a"), 4)
    out, _ = run("a", "--json")
    assert json.loads(out) == {"kind": "run", "page": "a/report.html"}


def test_half_a_line_at_the_end_does_not_matter(run: Any) -> None:
    folder = write_run(Path("a"), 4)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "loss"')
    run(folder)
    (curves,) = [
        one for one in records_in(folder / "report.html")["sections"] if one["name"] == "curves"
    ]
    assert curves["figure"]["data"][0]["x"] == [0, 1, 2, 3]


def test_markup_in_names_stays_text(run: Any) -> None:
    folder = write_run(Path("<img src=x onerror=alert(1)>"), 4)
    run(folder, "--out", "page.html")
    assert "<img" not in re.sub(
        r"<script>.*?</script>", "", Path("page.html").read_text(), flags=re.DOTALL
    )


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("missing.json", None, "missing.json does not exist: give the folder"),
        ("empty.json", "", "empty.json is empty: give the folder"),
        ("half.json", '{"placement": [[', "half.json is damaged or not JSON"),
        (
            "other.json",
            '{"a": 1}',
            "other.json is neither a run, a plan, a simulation nor",
        ),
        ("list.json", "[1, 2]", "list.json is neither a run"),
        ("text.json", "hello", "text.json is damaged or not JSON"),
        ("metrics.jsonl", "x\ny\nz\n", "metrics.jsonl holds no record of a step"),
        ("metrics.jsonl", '{"loss": 1}\n', "metrics.jsonl holds lines that are no records"),
        ("metrics.jsonl", "[" * 100_000 + "\n\n", "metrics.jsonl holds no record of a step"),
        ("metrics.jsonl", b"\xff\n", "metrics.jsonl is not text: delete it, or move it away"),
        ("metrics.jsonl", "", "has no finished step yet: wait for one, or follow it with --live"),
    ],
)
def test_anything_else_is_refused_with_one_sentence(
    run: Any, name: str, content: str | bytes | None, words: str
) -> None:
    if content is not None:
        Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    _, err = run(name, status=2)
    assert err.startswith("distca: ")
    assert words in err
    assert err.count("\n") == 1


def test_folders_and_options_that_cannot_be_meant_are_refused(run: Any) -> None:
    write_run(Path("a"), 4)
    Path("empty").mkdir()
    Path("other").mkdir()
    Path("other/x.txt").write_text("")
    Path("plan.json").write_text("{}")
    assert "no finished step yet" in run("empty", status=2)[1]
    assert "holds no metrics.jsonl, so it is not a run" in run("other", "a", status=2)[1]
    assert "3 paths: give one, or two" in run("a", "a", "a", status=2)[1]
    assert (
        "there is no folder nowhere; create it" in run("a", "--out", "nowhere/x.html", status=2)[1]
    )
    assert "is a file, not the folder of a run" in run("plan.json", "--live", status=2)[1]
    assert "leave out --out" in run("a", "--live", "--out", "x.html", status=2)[1]
    assert "give --live too" in run("a", "--port", "80", status=2)[1]
    (Path("a") / "config.json").write_text('{"train": 3}')
    assert "a is damaged" in run("a", status=2)[1]
