"""The report and the picture of ``benchmarks/curve.py``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

Curves = dict[str, Any]

REFERENCE = "plain"
COLORS = {"plain": "#bbbbbb", "plain, reversed": "#d08c2f", "distca": "#1f4e79"}
SHOWN = {"loss": "loss of the step", "grad_norm": "norm of the gradients"}


def read(path: Path) -> Curves:
    curves: Curves = json.loads(path.read_text())
    return curves


def apart(curves: Curves, side: str, what: str) -> np.ndarray:
    """Returns the relative difference from the plain loop, step by step."""
    own, plain = (np.array(curves["sides"][name][what]) for name in (side, REFERENCE))
    return np.abs(own - plain) / np.abs(plain)


def report(curves: Curves) -> str:
    sides = curves["sides"]
    done = len(sides[REFERENCE]["loss"])
    others = [name for name in sides if name != REFERENCE]
    lines = [
        f"# {done} steps on real text",
        "",
        f"`{curves['command']}`, {curves['date']}, {curves['ranks']} ranks, {curves['where']},"
        f" torch {curves['torch']}, {curves['precision']}. Steps of"
        f" {curves['tokens per step']:,} tokens of the Python standard library, documents of up to"
        f" {curves['context']:,}. The top of the script says what the sides are.",
        "",
        "| relative difference from the plain loop | " + " | ".join(others) + " |",
        "|---|" + "---|" * len(others),
    ]
    for what, title in SHOWN.items():
        differences = [apart(curves, name, what) for name in others]
        for kind, reduce in (("largest", np.max), ("median", np.median)):
            found = " | ".join(f"{reduce(one):.1e}" for one in differences)
            lines.append(f"| {title}, {kind} | {found} |")
    lines += [
        "",
        "| held-out documents | " + " | ".join(sides) + " |",
        "|---|" + "---|" * len(sides),
    ]
    evaluations = [side["eval"] for side in sides.values()]
    known = [step for step in evaluations[0] if all(step in one for one in evaluations)]
    if known:
        last = [one[known[-1]] for one in evaluations]
        for name in last[0]:
            found = " | ".join(f"{one[name]:.5f}" for one in last)
            lines.append(f"| {class_name(name)}, step {known[-1]} | {found} |")
    first, final = (
        ", ".join(f"{side['loss'][at]:.5f}" for side in sides.values()) for at in (0, -1)
    )
    seconds = ", ".join(f"{np.median(side['seconds']):.3f}" for side in sides.values())
    lines += ["", f"Losses of the first step: {first}; of the last: {final}."]
    lines += [f"Median seconds of a step: {seconds}."]
    return "\n".join(lines) + "\n"


def class_name(name: str) -> str:
    """Returns the words for a key such as ``eval_loss_from_256``."""
    kind = name.removeprefix("eval_loss").strip("_").replace("_", " ")
    return f"{kind} tokens" if kind else "all"


def draw(curves: Curves, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(10, 6.4), layout="constrained")
    (losses, norms), (differences, evaluation) = axes
    sides = curves["sides"]
    for name in (REFERENCE, "distca"):
        width = 5 if name == REFERENCE else 1
        for axis, what in ((losses, "loss"), (norms, "grad_norm")):
            steps = np.arange(len(sides[name][what])) + 1
            axis.plot(steps, sides[name][what], color=COLORS[name], linewidth=width, label=name)
    norms.set_yscale("log")
    for name in ("plain, reversed", "distca"):
        found = apart(curves, name, "loss")
        steps = np.arange(len(found)) + 1
        differences.plot(steps, found, ".", color=COLORS[name], markersize=3, label=name)
    differences.set_yscale("log")
    classes = [name for name in next(iter(sides["distca"]["eval"].values()), {}) if "_" in name[9:]]
    for kind in classes:
        for name in (REFERENCE, "distca"):
            points = [(int(step), one[kind]) for step, one in sides[name]["eval"].items()]
            style = {"linewidth": 5} if name == REFERENCE else {"linewidth": 1, "marker": "o"}
            label = name if kind == classes[0] else None
            evaluation.plot(*zip(*points, strict=True), color=COLORS[name], label=label, **style)
        # At the end of its line, since a legend of many classes would cover them.
        evaluation.annotate(
            class_name(kind),
            points[-1],
            (6, 0),
            textcoords="offset points",
            fontsize=8,
            va="center",
        )
    evaluation.margins(x=0.2)
    titles = {
        losses: "Loss per token (bytes)",
        norms: "Norm of the gradients",
        differences: "Relative difference of the loss from the plain loop",
        evaluation: "Loss of held-out documents, by their length",
    }
    for axis, title in titles.items():
        axis.set_title(title, fontsize=10, loc="left")
        axis.set_xlabel("step")
        axis.legend(frameon=False, fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)
