"""Examples in the documentation are run, its links lead somewhere, and its references are complete.

A python block prints the plain block that follows it. A page is run from top to bottom, and each
block knows the names of those before it. One without a plain block after it prints nothing.
"""

import contextlib
import io
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLE = re.compile(r"```python\n(.*?)```\n(?:\n*```\n(.*?)```)?", re.DOTALL)
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")
CODE = re.compile(r"`[^`\n]*`")
BY_NAME = re.compile(r"(?<!\\)\[[^\]\n]+\]\[[^\]\n]*\]")
VARIABLE = re.compile(
    r"(?:environ(?:\.get\(|\[|\.setdefault\()|_variable\()\"(\w+)\"|\"(DISTCA_\w+|CUDA_MPS_\w+)\""
)
PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def examples(page: Path) -> list[tuple[str, str]]:
    """Code and what it prints."""
    return EXAMPLE.findall(page.read_text())


@cache
def anchors(page: Path) -> set[str]:
    """The anchors of a page's titles, as GitHub and the site make them."""
    titles = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", [page for page in PAGES if examples(page)], ids=name)
def test_examples_print_what_they_say(page: Path) -> None:
    names: dict[str, Any] = {"__name__": "example"}
    for index, (code, printed) in enumerate(examples(page)):
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(compile(code, f"{page.name}:{index}", "exec"), names)
        assert output.getvalue() == printed, f"example {index} of {page.name}"


@pytest.mark.parametrize("page", ["reference/api", "planning", "attention", "pipeline"])
def test_page_has_examples(page: str) -> None:
    assert any(printed for _, printed in examples(ROOT / "docs" / f"{page}.md"))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in LINK.findall(FENCED.sub("", page.read_text())):
        if "://" in target or not (target or anchor):
            continue
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in anchors(file), f"{page.name} links to {target}#{anchor}"


def test_results_link_to_pages_only() -> None:
    """They are pages of the site, which has no scripts."""
    for result in (ROOT / "benchmarks" / "results").glob("*.md"):
        links = {target for target, _ in LINK.findall(result.read_text()) if "://" not in target}
        assert {target for target in links if not target.endswith(".md")} == set(), result.name


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_brackets_are_no_links_by_accident(page: Path) -> None:
    """A quoted a['b']['c'] is a link to 'c' otherwise, with which the site is not built."""
    text = CODE.sub("", FENCED.sub("", page.read_text()))
    assert BY_NAME.findall(text) == []


def test_every_page_is_in_the_navigation() -> None:
    listed = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert pages <= listed
    assert listed - pages == {"changelog.md", "contributing.md"}  # which docs/hooks.py adds


def test_every_environment_variable_is_documented() -> None:
    text = (ROOT / "docs" / "reference" / "environment.md").read_text()
    source = "".join(file.read_text() for file in (ROOT / "src").rglob("*.py"))
    read = {variable for found in VARIABLE.findall(source) for variable in found if variable}
    assert {"DISTCA_NCCL_LIBRARY", "LOCAL_WORLD_SIZE"} <= read
    assert sorted(variable for variable in read if f"`{variable}`" not in text) == []
