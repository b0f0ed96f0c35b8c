"""Report pages: one HTML file that contains everything it needs and loads nothing.

A page is a record of JSON values: its title, sentences, facts and sections, each with a figure of
plotly, a table, or a view of its own. ``assets/page.js`` draws it, so that a live page can be drawn
again from newer records. plotly is imported only when a file is made.
"""

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

# Colors by Okabe and Ito, which color-blind people can tell apart, on white and on black.
BLUE, ORANGE, GREEN, PINK, SKY, RED = COLORS = (
    "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00",
)  # fmt: skip
DASHES = ("solid", "dash", "dot", "dashdot")
# A page may run its own scripts and styles, and ask the server that it came from for news.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline';"
    " img-src data: blob:; connect-src 'self'"
)

SCRIPTS = ("cells.js", "pieces.js", "timeline.js", "page.js")  # in the order in which they run

Figure = dict[str, Any]  # ``data`` and ``layout`` of plotly


@dataclass(frozen=True)
class Table:
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Section:
    """A part of a page.

    name: under which it is found again when a live page changes; a link can lead to it.
    note: a sentence on how to read it.
    half: whether it stands beside another one where the screen is wide enough.
    view: records for the function of the page's scripts that is called ``draws``.
    """

    name: str
    title: str
    note: str = ""
    figure: Figure | None = None
    table: Table | None = None
    half: bool = False
    draws: str = ""
    view: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Page:
    """All that a page shows.

    words: sentences at the top, the most important first.
    facts: figures at the top by their names.
    """

    title: str
    words: Sequence[str]
    facts: Mapping[str, str]
    sections: Sequence[Section]

    def to_json(self) -> str:
        return json.dumps(asdict(self), allow_nan=False, separators=(",", ":"))

    def to_html(self, *, live: bool = False) -> str:
        """Returns the page as a file; a live one asks its server for newer records."""
        scripts = [_plotly(), *map(_asset, SCRIPTS)]
        return "\n".join(
            [
                "<!doctype html>",
                '<html lang="en">',
                "<head>",
                '<meta charset="utf-8">',
                '<meta name="viewport" content="width=device-width, initial-scale=1">',
                '<meta name="color-scheme" content="light dark">',
                f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
                '<link rel="icon" href="data:,">',
                f"<title>{html.escape(self.title)}</title>",
                f"<style>{_asset('page.css')}</style>",
                "</head>",
                f"<body{' data-live' if live else ''}>",
                "<main></main>",
                # "</script>" inside a string would end the script.
                '<script type="application/json" id="page">'
                + self.to_json().replace("<", "\\u003c")
                + "</script>",
                *(f"<script>{script}</script>" for script in scripts),
                "</body>",
                "</html>",
                "",
            ]
        )


def whole_ticks(count: int, most: int = 8) -> int:
    """Returns the distance of at most ``most`` ticks on an axis of whole numbers."""
    step = 1
    while count > most * step:
        step *= 2
    return step


@cache
def _asset(name: str) -> str:
    return files("distca.report.pages").joinpath("assets", name).read_text(encoding="utf-8")


@cache
def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise ValueError(
            "distca report needs plotly, which is not installed: pip install 'distca[report]'"
        ) from None
    return get_plotlyjs()
