"""Writes the files that are generated from the source: docs/config.md and examples/train.toml."""

from pathlib import Path

from distca.train.config import Config
from distca.train.config_text import markdown, toml

ROOT = Path(__file__).parent.parent
FILES = {
    ROOT / "docs" / "config.md": markdown,
    ROOT / "examples" / "train.toml": lambda: toml(Config()),
}

if __name__ == "__main__":
    for path, text in FILES.items():
        path.write_text(text())
