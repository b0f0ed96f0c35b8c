"""The tables and the picture of ``when_it_helps.py``, from its records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from distca.report.figures import new_figure

Record = dict[str, Any]
DOCS = Path(__file__).parent.parent / "docs"
PAGE, PICTURE = DOCS / "when-it-helps.md", DOCS / "images" / "when-it-helps.png"
BEGIN, END = "<!-- written by benchmarks/when_it_helps.py -->", "<!-- until here -->"
WAYS = ("kk", "wlb", "dynamic-cp", "distca")
ALIKE = 0.02  # differences up to this are within the error of a simulation
# Colors by Okabe and Ito.
COLORS = {"kk": "#F0E442", "wlb": "#CC79A7", "dynamic-cp": "#E69F00", "distca": "#56B4E9"}


def seconds(cell: Record, way: str) -> float | None:
    found = cell["ways"].get(way)
    return None if found is None else float(found["step_s"])


def winner(cell: Record) -> str:
    """Returns the fastest way; of those that are alike, the first, which is the simplest."""
    least = min(one["step_s"] for one in cell["ways"].values())
    return next(
        way for way in WAYS if way in cell["ways"] and seconds(cell, way) <= (1 + ALIKE) * least
    )


def gain(cell: Record) -> float | None:
    """Returns the fastest of the other ways over distca."""
    others = [one["step_s"] for way, one in cell["ways"].items() if way != "distca"]
    ours = seconds(cell, "distca")
    return None if ours is None or not others else min(others) / ours


def write_page(record: Record) -> None:
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    lines = [
        BEGIN,
        "",
        f"{record['date']}; global batches of each cell: {record['batches']}, with"
        f" {record['tokens_per_gpu'] // 1024}K tokens per GPU; {record['cpu_s']} s of CPU time.",
        "Seconds of a step; the last column is the fastest other way over `distca`.",
        "",
        "### RL, SFT, pretraining, and a larger model",
        "",
        *table(record["named"], {"model, cluster": lambda c: f"{c['model']}, {c['cluster']}"}),
        "",
        "### The map",
        "",
        "`prolong:SHARE`, whose long documents hold SHARE of the tokens; Llama-3-8B on H200s.",
        "",
        *table(record["map"], {"Gb/s per GPU": lambda c: str(c["gbit"])}),
        "",
        END,
    ]
    PAGE.write_text(before + "\n".join(lines) + after)


def table(cells: list[Record], more: dict[str, Any]) -> list[str]:
    heads = [
        *more,
        "GPUs",
        "lengths, context",
        *(f"`{way}`" for way in WAYS),
        "use",
        "others / distca",
    ]
    rows = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for cell in cells:
        times = (seconds(cell, way) for way in WAYS)
        ratio = gain(cell)
        words = [
            *(text(cell) for text in more.values()),
            str(cell["gpus"]),
            f"{cell['lengths']}, {cell['context']}K",
            *("does not fit" if one is None else f"{one:.2f} s" for one in times),
            f"`{winner(cell)}`",
            "-" if ratio is None else f"{ratio:.2f}",
        ]
        rows.append(f"| {' | '.join(words)} |")
    return rows


def draw(record: Record) -> None:
    """Draws one panel for each number of GPUs and link: shares over contexts."""
    cells = record["map"]
    panels = sorted({(one["gpus"], -one["gbit"]) for one in cells})
    figure = new_figure(5 * len(panels), 4.2)
    axes = figure.subplots(1, len(panels), squeeze=False).ravel()
    for axis, (gpus, negative) in zip(axes, panels, strict=True):
        chosen = [one for one in cells if (one["gpus"], -one["gbit"]) == (gpus, negative)]
        contexts = sorted({one["context"] for one in chosen})
        shares = sorted({share(one) for one in chosen})
        for one in chosen:
            x, y = contexts.index(one["context"]), shares.index(share(one))
            axis.add_patch(_square(x, y, COLORS[winner(one)]))
            ratio = gain(one)
            words = f"{winner(one)}\n" + ("" if ratio is None else f"distca {ratio:.2f} x")
            axis.text(x, y, words, ha="center", va="center", fontsize=10)
        axis.set_xlim(-0.5, len(contexts) - 0.5)
        axis.set_ylim(-0.5, len(shares) - 0.5)
        axis.set_xticks(range(len(contexts)), [f"{context}K" for context in contexts])
        axis.set_yticks(range(len(shares)), [f"{one:.0%}" for one in shares])
        axis.set_xlabel("context")
        axis.set_ylabel("tokens in long documents")
        title = f"{gpus} GPUs, {-negative} Gb/s per GPU between nodes"
        axis.set_title(title, loc="left", fontsize=11)
    figure.suptitle(
        "The simplest way within 2 % of the fastest, and distca's speed-up over the best other",
        fontsize=12,
    )
    figure.savefig(PICTURE)


def share(cell: Record) -> float:
    return float(cell["lengths"].partition(":")[2])


def _square(x: float, y: float, color: str) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x - 0.48, y - 0.48), 0.96, 0.96, color=color, alpha=0.75, linewidth=0)
