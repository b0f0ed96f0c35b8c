"""What the documentation site has besides docs/: other files of the repository, and links to them.

Pages link to files by their place in the repository, so that the links work there as well. On the
site, Markdown files outside of docs/ are pages, and examples are pages that show the file.
"""

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(?<=\]\()([^)#\s:]+)(?=[)#])")
NAME = re.compile(r"\[[\w/-]+\.md\](?=\(([^)#\s:]+))")  # a link whose text is the name of a page
LANGUAGES = {".sbatch": "bash", ".py": "python", ".toml": "toml", ".yaml": "yaml"}


def _published() -> dict[Path, str]:
    """Returns files outside of docs/, and where the site has them."""
    folder = ROOT / "benchmarks" / "results"
    results = sorted(folder.rglob("*.md"))
    examples = [p for p in sorted((ROOT / "examples").iterdir()) if p.suffix in LANGUAGES]
    return {
        ROOT / "CHANGELOG.md": "changelog.md",
        ROOT / "CONTRIBUTING.md": "contributing.md",
        **{path: f"results/{path.relative_to(folder).as_posix()}" for path in results},
        **{path: f"examples/{path.name}.md" for path in examples},
    }


PUBLISHED = _published()
SOURCES = {uri: path for path, uri in PUBLISHED.items()}


def on_files(files: Any, config: Any) -> Any:
    """Adds the published files; mkdocs calls it when it has found those in docs/."""
    for path, uri in PUBLISHED.items():
        text = path.read_text()
        if path.suffix in LANGUAGES:
            text = f"# {path.name}\n\n```{LANGUAGES[path.suffix]}\n{text}```\n"
        files.append(File.generated(config, uri, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Turns links by place in the repository into links by place on the site.

    In the repository, a page is called by the name of its file, on the site by its title.
    """
    uri, docs = page.file.src_uri, Path(config["docs_dir"])
    here = SOURCES.get(uri, docs / uri).parent

    def title(found: re.Match[str]) -> str:
        target = here / found[1]
        return f"[{target.read_text().splitlines()[0][2:]}]" if target.exists() else found[0]

    def place(found: re.Match[str]) -> str:
        target = Path(os.path.normpath(here / found[0]))
        if target.is_relative_to(docs):
            there = target.relative_to(docs).as_posix()
        elif target in PUBLISHED:
            there = PUBLISHED[target]
        else:
            return found[0]  # mkdocs reports it, unless it is no link at all
        return os.path.relpath(there, Path(uri).parent)

    return LINK.sub(place, NAME.sub(title, markdown))
