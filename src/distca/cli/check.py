"""``distca check``: whether packed documents attend to each other in a model of transformers."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from distca.cli.command import argument, console, json_switch, option, showing_progress
from distca.report.checks import checks_table, leaks_words
from distca.report.progress import Update

if TYPE_CHECKING:
    from torch import nn


# How trainers call a model with packed documents: transformers' Trainer passes use_cache=False, and
# True is the default; some give cu_seq_lens besides position_ids.
_CALLS = tuple(product((False, True), (False, True)))


@dataclass(frozen=True, kw_only=True)
class CheckCommand:
    """Checks whether packed documents of a transformers model attend to each other.

    Changes one document after another and reports the first layer in which
    others change too. Exits with status 1 if there is one, and with 2 if nothing
    could be checked. Weights are random if the folder holds only a config.

    For example: distca check models/qwen3-8b
    """

    model: Path = argument("MODEL_DIR", "Folder with a config.json, and weights if any.")
    attention: list[str] | None = option(
        "NAME", "An attn_implementation; may be repeated. Default: sdpa and distca."
    )
    as_json: bool = json_switch()

    def run(self) -> None:
        try:
            from distca.integrations.transformers import register
        except ImportError as error:
            raise ValueError(str(error)) from None
        from distca.integrations.transformers.leaks import load

        register()
        loaded = load(self.model)
        names = self.attention or ["sdpa", "distca"]
        with showing_progress("call", len(names) * len(_CALLS), quiet=self.as_json) as update:
            rows = _rows(loaded, names, update)
        words = leaks_words(rows)
        if self.as_json:
            typer.echo(json.dumps({"model": str(self.model), "checks": rows, "words": words}))
        else:
            table = checks_table(rows)
            table.columns[0].no_wrap, table.columns[0].overflow = False, "fold"  # names are long
            screen = console()
            screen.print(table)
            for sentence in ("", *words):
                screen.print(sentence)
        outcomes = {row["passed"] for row in rows}
        raise typer.Exit(1 if False in outcomes else 0 if True in outcomes else 2)


def _rows(model: "nn.Module", names: Sequence[str], update: Update) -> list[dict[str, Any]]:
    """Returns a row for each attention and call, or one for an attention whose first call fails."""
    rows: list[dict[str, Any]] = []
    failed: set[str] = set()
    for number, (name, call) in enumerate(product(names, _CALLS)):
        if name in failed:
            continue
        use_cache, cu_seq_lens = call
        check = f"{name}, use_cache={use_cache}{', cu_seq_lens' if cu_seq_lens else ''}"
        update(number, check)
        outcome = _outcome(model, name, use_cache, cu_seq_lens)
        if outcome["passed"] is None and call == _CALLS[0]:
            failed.add(name)
            check = name
        rows.append({"check": check, "attention": name, **outcome})
    return rows


def _outcome(
    model: "nn.Module", attention: str, use_cache: bool, cu_seq_lens: bool
) -> dict[str, Any]:
    from distca.integrations.transformers.leaks import find_leaks

    try:
        _set(model, attention)
        # With gradients, as in training: without them distca does more.
        leaks = find_leaks(model, cu_seq_lens=cu_seq_lens, gradients=True, use_cache=use_cache)
    except Exception as error:  # the model may fail for any reason, and distca may refuse it
        words = str(error).split(". ")[0] or type(error).__name__
        return {"passed": None, "leaks": [], "words": words}
    words = "no document sees another"
    if leaks:
        first = leaks[0]
        moved = ", ".join(map(str, first.moved))
        words = f"{first.layer}: documents {moved} see document {first.changed}"
    return {"passed": not leaks, "leaks": [asdict(leak) for leak in leaks], "words": words}


def _set(model: Any, attention: str) -> None:
    model.set_attn_implementation(attention)
    if model.config._attn_implementation != attention:  # transformers only warns
        own = model.config._attn_implementation
        raise ValueError(
            f"{type(model).__name__} supports only its own attention: use --attention {own}"
        )
