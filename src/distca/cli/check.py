"""``distca check``: do packed documents leak into each other in a model of transformers?"""

# torch and transformers are imported inside the functions: `distca --help` must not wait for them.
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

if TYPE_CHECKING:
    from torch import nn


def check(
    model: Annotated[Path, Argument(metavar="MODEL_DIR", help="With a config.json at least.")],
    attention: Annotated[
        list[str] | None,
        Option(
            metavar="NAME",
            help="An attn_implementation; may be repeated. By default sdpa and distca.",
        ),
    ] = None,
    as_json: Annotated[bool, Option("--json", help="One JSON object, for machines.")] = False,
) -> None:
    """Changes one packed document after another, and says which layer lets others notice.

    Ends with status 1 where one does, and 2 where nothing could be checked. Weights are random
    where the folder has only a config.
    """
    try:
        from distca.integrations.transformers import register
    except ImportError as error:
        raise ValueError(str(error)) from None
    from distca.integrations.transformers.leaks import load

    register()
    loaded = load(model)
    rows = [row for name in attention or ["sdpa", "distca"] for row in _rows(loaded, name)]
    if as_json:
        typer.echo(json.dumps({"model": str(model), "checks": rows}))
    else:
        from rich.console import Console

        from distca.report.checks import checks_table

        table = checks_table(rows)
        table.columns[0].no_wrap, table.columns[0].overflow = False, "fold"  # names are long
        Console().print(table)
    outcomes = {row["passed"] for row in rows}
    raise typer.Exit(1 if False in outcomes else 0 if True in outcomes else 2)


def _rows(model: "nn.Module", attention: str) -> list[dict[str, Any]]:
    """One for each way in which trainers call a model with packed documents."""
    rows: list[dict[str, Any]] = []
    for use_cache in (False, True):  # transformers' Trainer says False; True is the default
        for cu_seq_lens in (False, True):  # beside position_ids
            outcome = _outcome(model, attention, use_cache, cu_seq_lens)
            given = f"use_cache={use_cache}{', cu_seq_lens' if cu_seq_lens else ''}"
            if outcome["passed"] is None and not rows:
                return [{"check": attention, **outcome}]
            rows.append({"check": f"{attention}, {given}", **outcome})
    return rows


def _outcome(
    model: "nn.Module", attention: str, use_cache: bool, cu_seq_lens: bool
) -> dict[str, Any]:
    from distca.integrations.transformers.leaks import find_leaks

    try:
        _set(model, attention)
        # With gradients, as in training: without them distca does more.
        leaks = find_leaks(model, cu_seq_lens=cu_seq_lens, gradients=True, use_cache=use_cache)
    except Exception as error:  # the model cannot, for whatever reason, or distca refuses
        words = str(error).split(". ")[0] or type(error).__name__
        return {"passed": None, "leaks": [], "words": words}
    words = "documents keep to themselves"
    if leaks:
        first = leaks[0]
        moved = ", ".join(map(str, first.moved))
        words = f"{first.layer}: documents {moved} see document {first.changed}"
    return {"passed": not leaks, "leaks": [asdict(leak) for leak in leaks], "words": words}


def _set(model: Any, attention: str) -> None:
    model.set_attn_implementation(attention)
    if model.config._attn_implementation != attention:  # transformers only warns
        own = model.config._attn_implementation
        raise ValueError(f"{type(model).__name__} attends in its own way: --attention {own}")
