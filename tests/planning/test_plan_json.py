"""A plan that was changed in its file is refused in one sentence, or computes what it should."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attention.test_exact import on_all_ranks
from attention.tokens import Tokens, assert_exact
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import Batch

from distca.planning.plan import Plan

FINE = {"cost": "pairs", "tile": 4, "min_shard": 4, "tolerance": 0.1}
PLANS = [
    Batch([[60], [8, 8], []], FINE).plan(),
    Batch([[60, 3], [8]], FINE | {"servers": 1, "mask": "window:7"}).plan(),
    Batch([[{"document": 0, "start": 0, "stop": 30}], [{"document": 0, "start": 30, "stop": 60}]],
          FINE | {"mask": "full"}).plan(),
]  # fmt: skip
DATA = [json.loads(json.dumps(plan.to_json())) for plan in PLANS]
VALUES: list[Any] = [
    -1, 0, 1, 2, 7, 99, 1 << 31, 1 << 62, 1 << 63, 10**40, 1.5, -0.5, 1e300, float("nan"),
    float("inf"), "", "7", "causal", "full", "window:3", None, True, [], [0], {}, {"document": 0},
]  # fmt: skip


def places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Returns the paths of all values in a JSON value."""
    inner = (
        data.items()
        if isinstance(data, dict)
        else enumerate(data)
        if isinstance(data, list)
        else ()
    )
    below = [place for key, value in inner for place in places(value, (*path, key))]
    return [path, *below] if path else below


def mutated(data: Any, path: tuple[Any, ...], how: str, value: Any) -> Any:
    data = copy.deepcopy(data)
    parent, last = data, path[-1]
    for key in path[:-1]:
        parent = parent[key]
    if how == "drop":
        del parent[last]
    elif how == "repeat" and isinstance(parent, list):
        parent.insert(last, copy.deepcopy(parent[last]))
    elif how == "swap" and isinstance(parent, list):
        parent[last], parent[0] = parent[0], parent[last]
    elif how == "add" and isinstance(parent[last], int) and not isinstance(parent[last], bool):
        parent[last] += 1 if value else -1
    else:
        parent[last] = value
    return data


@st.composite
def changes(draw: st.DrawFn) -> Any:
    data = DATA[draw(st.integers(0, len(DATA) - 1))]
    for _ in range(draw(st.integers(1, 2))):
        path = draw(st.sampled_from(places(data)))
        how = draw(st.sampled_from(["drop", "repeat", "swap", "add", "set", "set"]))
        data = mutated(data, path, how, draw(st.sampled_from(VALUES)))
    return data


def read(data: Any) -> tuple[Plan | None, str]:
    """Returns the plan, or why it is refused; any other error is raised."""
    try:
        return Plan.from_json(data), ""
    except ValueError as error:
        return None, str(error)


@settings(max_examples=250)
@given(changes())
def test_a_changed_plan_is_refused_or_right(data: Any) -> None:
    plan, sentence = read(data)
    if plan is None:
        assert sentence
        assert "\n" not in sentence
        return
    tokens = Tokens(plan, torch.float64)
    assert_exact(on_all_ranks(plan, tokens, "reference", "steps"), tokens.expected(), torch.float64)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))).fingerprint == plan.fingerprint


def test_every_value_may_be_of_every_kind() -> None:
    """Each value of a file is dropped, and replaced by each of the odd values."""
    for path in places(DATA[0]):
        assert read(mutated(DATA[0], path, "drop", None))[0] is None or path[0] in (
            "model",
            "summary",
        )
        for value in VALUES:
            read(mutated(DATA[0], path, "set", value))


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(
    "column", ["document", "q_start", "q_stop", "kv_start", "kv_stop", "server"]
)
def test_the_fingerprint_covers_all_that_is_executed(direction: str, column: str) -> None:
    plan = PLANS[0]
    tasks = getattr(plan, direction)
    values = getattr(tasks, column).copy()
    values[-1] += 1
    other = replace(plan, **{direction: replace(tasks, **{column: values})})
    assert other.fingerprint != plan.fingerprint
    assert replace(plan, reach=np.full_like(plan.reach, 3)).fingerprint != plan.fingerprint


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "7", "[" * 100_000, '{"tasks": []}', "\x00"]
)
def test_a_file_without_a_plan_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"^.*plan\.json: "):
        Plan.load(path)
