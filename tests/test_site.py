"""The documentation site: it builds strictly, and its pages work in a browser without a network.

Run with ``-m browser`` where a Chromium and the extra ``docs`` are installed.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]
ROOT = Path(__file__).parent.parent
VIEWS = [(1300, "light"), (400, "dark")]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material", reason="the extra docs is not installed")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(params=VIEWS, ids=lambda view: f"{view[0]}-{view[1]}")
def page(browser: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A page that fails the test if the browser complains or loads something from elsewhere."""
    width, scheme = request.param
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: complaints.extend(elsewhere(request.url)))
    yield page
    page.close()
    assert complaints == []


def elsewhere(url: str) -> list[str]:
    return [] if url.startswith(("file:", "data:")) else [f"loads {url}"]


def test_every_page_opens_and_fits(site: Path, page: Any) -> None:
    files = sorted(set(site.rglob("*.html")) - {site / "404.html"})  # which needs a server
    assert len(files) > 50
    for file in files:
        page.goto(file.as_uri())
        broken = "() => [...document.images].filter(i => !i.naturalWidth).map(i => i.src)"
        assert page.evaluate(broken) == [], file.name
        size = page.evaluate("() => [document.documentElement.scrollWidth, innerWidth]")
        assert size[0] <= size[1], f"{file.name} is wider than the window"
        assert page.locator("h1").count() == 1, file.name


def test_search_finds_a_page(site: Path, page: Any) -> None:
    page.goto((site / "howto" / "slurm.html").as_uri())
    if page.viewport_size["width"] < 500:
        page.click("label.md-header__button[for=__search]")
    page.locator(".md-search__input").press_sequentially("ping-pong")
    page.locator(".md-search-result__link").first.click()
    page.wait_for_url("**/ping-pong.html*")
