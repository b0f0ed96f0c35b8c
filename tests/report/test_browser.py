"""Pages in a real browser: they load, draw and answer to mouse and keyboard, and load nothing.

Run with ``-m browser`` where a Chromium is installed, such as that of Debian's package.
"""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from report_records import steps, write_run

from distca.cli import main
from distca.cli.live import LiveServer
from distca.cli.report_inputs import read_page, run_state, runs_page
from distca.planning.api import plan
from distca.planning.options import PlanOptions

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]
DRAWN = "() => document.querySelectorAll('.js-plotly-plot .main-svg').length"
Open = Callable[..., Any]


@pytest.fixture
def show(browser: Any, tmp_path: Path) -> Iterator[Open]:
    """Opens the page of what is given; fails at the end if the browser has complained."""
    complaints: list[str] = []
    pages = []

    def open_page(*paths: Path, url: str = "", **context: Any) -> Any:
        if not url:
            file = tmp_path / "page.html"
            file.write_text(read_page(paths)[1].to_html())
            url = file.as_uri()
        page = browser.new_page(**{"viewport": {"width": 1200, "height": 900}} | context)
        page.set_default_timeout(60_000)
        pages.append(page)
        page.on("console", lambda message: said(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: loaded(request.url, url))
        page.goto(url)
        page.wait_for_function(DRAWN)
        return page

    def said(text: str) -> None:
        if "ERR_CONNECTION_REFUSED" not in text:  # the server of a live page has ended
            complaints.append(text)

    def loaded(what: str, url: str) -> None:
        allowed = (url, f"{url}page.json", "data:", "blob:")
        if not what.startswith(allowed):
            complaints.append(f"loads {what}")

    yield open_page
    for page in pages:
        page.close()
    assert not complaints


def hover(page: Any, place: Any, across: float, down: float, shows: str) -> Any:
    """Moves the mouse at a place, in shares of its size, until what it shows is visible."""
    place.scroll_into_view_if_needed()
    box = place.bounding_box()
    x, y = box["x"] + across * box["width"], box["y"] + down * box["height"]
    for attempt in range(100):  # plotly answers to a mouse that moves, and not at once
        page.mouse.move(x + attempt % 2, y)
        page.wait_for_timeout(200)
        if page.locator(shows).is_visible():
            return page.locator(shows)
    pytest.fail(f"{shows} is not shown")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_run_is_drawn_in_both_themes(show: Open, tmp_path: Path, scheme: str) -> None:
    page = show(write_run(tmp_path / "a", 10), color_scheme=scheme)
    assert page.title().endswith("a")
    paper = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(255, 255, 255)") == (scheme == "light")
    assert page.locator("#curves .scatterlayer .trace").count() > 10
    assert page.locator("#ranks-0 .heatmaplayer image").count() == 2
    other = "dark" if scheme == "light" else "light"
    page.emulate_media(color_scheme=other)
    page.wait_for_function(
        "old => getComputedStyle(document.body).backgroundColor !== old", arg=paper
    )


def test_hovering_a_step_shows_its_values(show: Open, tmp_path: Path) -> None:
    page = show(write_run(tmp_path / "a", 10))
    place = page.locator("#curves .nsewdrag").first
    text = hover(page, place, 0.5, 0.5, "#curves .hoverlayer .legend").text_content()
    assert "training" in text
    assert "measured" in text  # of another panel over the same axis


def test_pointing_at_a_tick_says_what_a_rank_does(show: Open, tmp_path: Path) -> None:
    page = show(write_run(tmp_path / "a", 10))
    assert page.locator("#ticks-newest-0 .heatmaplayer image").count() == 3
    names = page.locator("#ticks-newest-0 .heatmap-label").all_text_contents()
    assert [name for name in names if name] == ["F0", "F1", "B0", "B1", "F0", "B0", "F1", "B1"]
    place = page.locator("#ticks-newest-0 .nsewdrag").nth(1)
    text = hover(page, place, 0.6, 0.5, "#ticks-newest-0 .hoverlayer .hovertext").text_content()
    assert "tick 3, rank 1, stage 1: F1" in text


def test_tables_open_by_keyboard(show: Open, tmp_path: Path) -> None:
    page = show(write_run(tmp_path / "a", 10))
    page.locator("#curves summary").focus()
    page.keyboard.press("Enter")
    assert page.locator("#curves tbody tr").count() == 10
    assert page.locator("#curves tbody tr").first.is_visible()


def test_a_narrow_page_does_not_scroll_sideways(show: Open, tmp_path: Path) -> None:
    page = show(write_run(tmp_path / "a", 10), viewport={"width": 420, "height": 800})
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    ranks = [[65536], [8192, 8192], [4096] * 3]
    plan(ranks, PlanOptions(model="llama3-8b", servers=1, workers_serve=True)).save(path)
    return path


def test_pointing_at_a_piece_names_it_and_a_click_follows_its_document(
    show: Open, plan_file: Path
) -> None:
    page = show(plan_file)
    held, computed = (page.locator("#pieces .nsewdrag").nth(side) for side in (0, 1))
    words = hover(page, held, 0.3, 0.08, ".tip").inner_text()
    assert "document 0 of 65,536 tokens" in words
    assert "[0, 65,536) held by rank 0" in words
    words = hover(page, computed, 0.3, 0.92, ".tip").inner_text()  # the server in the last row
    assert "on rank 3 (server 0), for rank 0" in words
    page.mouse.down()
    page.mouse.up()
    page.wait_for_selector("#pieces .about h2")
    assert "Document 0: 65,536 tokens, causal" in page.locator("#pieces .about").inner_text()
    assert page.locator("#pieces .about tbody tr").count() > 1
    assert page.locator("#document").input_value() == "0"
    page.keyboard.press("Tab")
    page.locator("#documents").focus()
    page.keyboard.press("Escape")
    assert page.locator("#pieces .about h2").count() == 0


def test_documents_are_followed_by_keyboard(show: Open, plan_file: Path) -> None:
    page = show(plan_file)
    page.locator("#documents").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    first = page.locator("#pieces .about h2").inner_text()
    page.keyboard.press("ArrowDown")
    page.wait_for_function(
        "old => document.querySelector('.about h2').innerText !== old", arg=first
    )
    page.locator("#way").focus()
    page.keyboard.press("ArrowDown")
    assert page.locator("#way").input_value() == "backward"


def test_a_simulation_has_a_timeline_that_can_be_pointed_at(
    show: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    small = ["--gpus=4", "--gpus-per-node=2", "--tp=1", "--layers=2", "--batches=1"]
    small += ["--context=64K", "--sequences=2", "--policy=distca", "--placement=given"]
    with pytest.raises(SystemExit):
        main(["simulate", *small, "--json", "--trace=trace.json"])
    Path("simulation.json").write_text(capsys.readouterr().out)
    page = show(Path("simulation.json"))
    words = hover(page, page.locator("#timeline .nsewdrag"), 0.5, 0.02, "#timeline .tip")
    assert "rank 0, compute" in words.inner_text()
    assert page.locator("#step .bars path").count() == 1


def test_a_live_page_follows_its_run_and_outlives_its_server(show: Open, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", 3)
    server = LiveServer(partial(runs_page, [folder]), partial(run_state, [folder]))
    thread = Thread(target=server.serve_until_interrupted)
    thread.start()
    page = show(url=server.url)
    page.wait_for_function("() => document.body.innerText.includes('3 of 12')")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("".join(json.dumps(one) + "\n" for one in steps(5)[3:]) + '{"step": 5, "lo')
    page.wait_for_function("() => document.body.innerText.includes('5 of 12')")
    assert page.evaluate("() => document.querySelector('#curves .plot').data[0].x.length") == 5
    server.stop()
    thread.join()
    page.wait_for_function("() => document.body.innerText.includes('not live any more')")
