"""Every key of the config is documented, and the documents are those of today."""

from __future__ import annotations

import runpy
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distca.cli import main
from distca.schema import Key, keys
from distca.train.config import Config
from distca.train.config_text import toml, toml_value

ROOT = Path(__file__).parents[2]
GENERATE = ROOT / "docs" / "generate.py"
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
VALUES = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


def printed(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["train", "--print-config", *options])
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("key", list(keys(Config())), ids=lambda key: key.path)
def test_every_key_has_a_meaning(key: Key) -> None:
    assert key.meaning.endswith((".", "...")), f"declare {key.path} by schema.key, with a sentence"


def test_generated_files_are_current() -> None:
    for path, text in runpy.run_path(str(GENERATE))["FILES"].items():
        assert path.read_text() == text(), f"run python {GENERATE.relative_to(ROOT)}"


def test_the_example_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    example = ROOT / "examples" / "train.toml"
    assert printed(capsys) == example.read_text()
    assert Config.read(example) == Config()


def test_a_printed_config_is_the_one_that_would_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[model]\nsizes = { layers = 2 }\n[train]\nlr = 1e-4\nfrozen = ["seams.0.*"]\n')
    text = printed(capsys, str(path), "--set", "train.steps=7", "--out", 'a "b"', "--from", "3")
    assert "Learning rate after the warm-up. Default: 0.0003.\nlr = 0.0001\n" in text
    again = tmp_path / "again.toml"
    again.write_text(text)
    expected = Config.read(path, ["train.steps=7"])
    assert Config.read(again) == replace(expected, out='a "b"', from_step=3)


@given(VALUES)
def test_values_are_written_as_toml(value: object) -> None:
    assert tomllib.loads(f"x = {toml_value(value)}")["x"] == value


def test_lines_are_short() -> None:
    assert max(map(len, toml(Config()).splitlines())) <= 100
