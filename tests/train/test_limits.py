"""Hostile values of every key: a valid config or one sentence, and never another exception."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from distca import schema
from distca.runtime.launched import sentence
from distca.schema import Key
from distca.train.config import Config
from distca.train.setup import Components

NUMBERS = [
    -(10**400), -1, 0, 1, 2, 3, 10**6, 2**31, 2**63, 10**30, 10**400, -math.inf, -1.5, -0.0, 1e-300,
    0.5, 1.5, 1e300, math.inf, math.nan,
]  # fmt: skip
OTHERS = [
    True, "", "x", "é", "\0", "/dev/null", "a" * 5000, "[" * 5000, "~nobody/x", "*", "ids:0",
    "ids:99999999999", "fixed:0", "lognormal:nan:1", "prolong:nan", "scaled:0:0", "scaled:nan:inf",
    None, [], [""], [[1]], {}, {"a": 1},
]  # fmt: skip
SMALL = ["data.context=64", "train.tokens_per_step=256", "train.eval_every=1", "train.steps=3"]
SIZES = [
    "vocab_size", "hidden", "layers", "heads", "kv_heads", "head_dim", "ffn", "rope_theta",
    "norm_eps", "window", "window_pattern", "context",
]  # fmt: skip


def start(settings: dict[str, Any], where: Path) -> str:
    """Does what comes before a start, with values by key; returns the sentence, or nothing."""
    values: dict[str, Any] = {}
    for setting in [*SMALL, f"data.sources={where}"]:
        schema.assign(values, setting)
    for path, value in settings.items():
        *sections, last = path.split(".")
        inner = values
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[last] = value
    try:
        Components.of(schema.build(Config, values), 2, torch.device("cpu"))
    except (ValueError, OSError) as error:
        return sentence(error)
    return ""


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for number in range(4):
        (folder / f"{number}.txt").write_text("some text " * 40)
    return folder


def numeric_keys() -> Iterator[Key]:
    for key in schema.keys(Config()):
        if {key.kind, *get_args(key.kind)} & {int, float}:
            yield key


@pytest.mark.parametrize("key", [*schema.keys(Config())], ids=lambda key: key.path)
def test_any_value_of_a_key_is_valid_or_refused_in_a_sentence(
    key: Key, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(text)  # in which a glob looks for files
    pairs = [[value, value] for value in NUMBERS] if isinstance(key.value, tuple) else []
    for value in [*NUMBERS, *OTHERS, *pairs]:
        assert "\n" not in start({key.path: value}, text)


@pytest.mark.parametrize("size", SIZES)
def test_any_size_of_a_model_is_valid_or_refused_in_a_sentence(size: str, text: Path) -> None:
    for value in NUMBERS:
        assert "\n" not in start({f"model.sizes.{size}": value}, text)


@pytest.mark.parametrize("key", [*numeric_keys()], ids=lambda key: key.path)
def test_every_number_has_limits_on_both_sides(key: Key) -> None:
    limits = key.limits
    assert limits is not None, f"declare {key.path} with limits"
    assert -math.inf < limits.least
    assert min(limits.most, limits.below) < math.inf
    for beyond in (limits.least - 1, 10**400, math.nan):
        section, name = (key.section, key.name) if key.section else (key.name, "")
        values = (beyond,) * len(key.value or "1") if isinstance(key.value, tuple) else beyond
        config = Config()
        with pytest.raises(ValueError, match=rf"^{key.path} = .*: (it|each) must be (at|below)"):
            replace(config, **{
                section: replace(getattr(config, section), **{name: values}) if name else values
            })  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"parallel.cp": 0}, "parallel.cp = 0: it must be at least 1"),
        ({"parallel.tp": -1}, "parallel.tp = -1: it must be at least 1"),
        ({"parallel.pp": 0}, "parallel.pp = 0: it must be at least 1"),
        ({"parallel.dp": -1}, "parallel.dp = -1: it must be at least 0"),
        ({"parallel.memory_gib": math.inf}, "parallel.memory_gib = inf: it must be at most"),
        ({"parallel.memory_gib": -1}, "parallel.memory_gib = -1.0: it must be at least 0"),
        ({"parallel.memory_gib": 1e-300}, "GiB per rank .* and has 9.3e-10: use more ranks"),
        ({"parallel.attention_memory_gib": math.nan}, "attention_memory_gib = nan: it must be at"),
        ({"parallel.attention_memory_gib": 1e-300}, "memory"),
        ({"parallel.speed": [1, -1]}, r"parallel.speed = \[1.0, -1.0\]: each must be at least 0"),
        ({"parallel.ranks_per_node": 10**8}, "= 100000000: it must be a whole number from 1 to"),
        ({"train.tokens_per_step": 2**63}, "tokens_per_step = 9223372036854775808: it must be at"),
        ({"train.tokens_per_step": 10**9}, "this run needs about"),
        ({"train.lr": 10**400}, "train.lr = 10+: it is too large for a number"),
        ({"train.eval_tokens": 0}, "train.eval_tokens = 0: it must be at least 1"),
        ({"model.sizes.layers": 10**30}, "layers = 10+: it must be from 1 to 10000"),
        ({"model.sizes.rope_theta": math.nan}, "rope_theta = nan: it must be above 0 and finite"),
    ],
)
def test_what_cannot_be_is_named(settings: dict[str, Any], said: str, text: Path) -> None:
    with pytest.raises(ValueError, match=said):
        raise ValueError(start(settings, text))
