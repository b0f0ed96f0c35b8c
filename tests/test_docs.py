"""Examples in the documentation are run: a python block followed by a plain block prints it."""

import contextlib
import io
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLE = re.compile(r"```python\n(.*?)```\n+```\n(.*?)```", re.DOTALL)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def examples() -> list[tuple[str, str, str]]:
    return [
        (f"{page.name}:{index}", code, printed)
        for page in PAGES
        for index, (code, printed) in enumerate(EXAMPLE.findall(page.read_text()))
    ]


@pytest.mark.parametrize(("name", "code", "printed"), examples(), ids=lambda value: str(value)[:20])
def test_example_prints_what_it_says(name: str, code: str, printed: str) -> None:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(code, name, "exec"), {"__name__": "example"})
    assert output.getvalue() == printed


def test_readme_and_planning_page_have_examples() -> None:
    assert {"README.md", "planning.md"} <= {name.split(":")[0] for name, _, _ in examples()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
