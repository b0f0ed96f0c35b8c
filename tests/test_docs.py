"""Examples in the documentation are run: a python block prints the plain block that follows it.

A page is run from top to bottom, and each block knows the names of those before it. One without a
plain block after it prints nothing.
"""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLE = re.compile(r"```python\n(.*?)```\n(?:\n*```\n(.*?)```)?", re.DOTALL)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def examples(page: Path) -> list[tuple[str, str]]:
    """Code and what it prints."""
    return EXAMPLE.findall(page.read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_print_what_they_say(page: Path) -> None:
    names: dict[str, Any] = {"__name__": "example"}
    for index, (code, printed) in enumerate(examples(page)):
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(compile(code, f"{page.name}:{index}", "exec"), names)
        assert output.getvalue() == printed, f"example {index} of {page.name}"


@pytest.mark.parametrize(
    "name", ["README.md", "docs/planning.md", "docs/attention.md", "docs/pipeline.md"]
)
def test_page_has_examples(name: str) -> None:
    assert any(printed for _, printed in examples(ROOT / name))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
