"""Dataclasses from TOML: sections, types, and one sentence for each mistake."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import pytest

from distca.schema import Limits, assign, build, check, check_limits, key, read_toml


@dataclass(frozen=True)
class Inner:
    size: int = 1
    share: Annotated[float, "an annotation"] = 0.5
    names: tuple[str, ...] = ()
    pair: tuple[float, float] = (0.0, 1.0)


@dataclass(frozen=True)
class Outer:
    inner: Inner = field(default_factory=Inner)
    name: str = "x"
    on: bool = False
    limit: int | None = None
    more: list[str] | None = None
    free: Mapping[str, Any] = field(default_factory=dict)


def test_values_become_fields_and_the_rest_keeps_its_default() -> None:
    values = {"inner": {"size": 3, "share": 1, "names": "a", "pair": [1, 2]}}
    built = build(
        Outer, values | {"name": 64, "limit": 5, "more": ["b", 7], "free": {"any": "thing"}}
    )
    assert built.inner == Inner(3, 1.0, ("a",), (1.0, 2.0))
    assert isinstance(built.inner.share, float)
    assert (built.name, built.on, built.limit, built.more) == ("64", False, 5, ["b", "7"])
    assert built.free == {"any": "thing"}
    assert check(Outer, {"name": [64, 128]}) == {"name": "64,128"}


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"nmae": 1}, "nmae is unknown: did you mean name?"),
        (
            {"inner": {"zzz": 1}},
            "inner.zzz is unknown: choose one of size, share, names, pair",
        ),
        ({"inner": 3}, "inner = 3: it must be a section with names and values"),
        ({"free": 3}, "free = 3: it must be a section with names and values"),
        ({"inner": {"size": 1.5}}, "inner.size = 1.5: it must be a whole number"),
        ({"inner": {"size": True}}, "inner.size = True: it must be a whole number"),
        ({"inner": {"share": "1"}}, "inner.share = '1': it must be a number"),
        ({"inner": {"share": True}}, "inner.share = True: it must be a number"),
        ({"inner": {"names": [True]}}, "inner.names = True: it must be text"),
        ({"inner": {"pair": [1]}}, "inner.pair has 1 values: it must have 2"),
        ({"on": 1}, "on = 1: it must be true or false"),
        ({"limit": "5"}, "limit = '5': it must be a whole number"),
        ({"inner": {"share": 10**309}}, f"inner.share = {10**309}: it is too large for a number"),
    ],
)
def test_mistakes_are_one_sentence(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        build(Outer, values)
    assert str(raised.value) == sentence


def test_settings_are_read_as_toml_or_as_text() -> None:
    values: dict[str, Any] = {"inner": {"size": 1}}
    for setting in ("inner.size=2", "inner.names=['a', 'b']", "name = some text", "on=true"):
        assign(values, setting)
    assert values == {
        "inner": {"size": 2, "names": ["a", "b"]}, "name": "some text", "on": True
    }  # fmt: skip
    for setting, sentence in (("name", "write it as"), ("name.x=1", "name is a value, not a sec")):
        with pytest.raises(ValueError, match=sentence):
            assign(values, setting)


def test_a_file_is_named_in_its_mistakes(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text("on = true\n[inner]\nsize = 2\n")
    assert read_toml(path, Outer) == {"on": True, "inner": {"size": 2}}
    path.write_text("on = 3\n")
    with pytest.raises(ValueError, match=r"a\.toml: on = 3: it must be true or false"):
        read_toml(path, Outer)
    path.write_text("on = [")
    with pytest.raises(ValueError, match=r"a\.toml is not TOML: "):
        read_toml(path)


@dataclass(frozen=True)
class Limited:
    size: int = key(1, "A size.", Limits(1, 9))
    shares: tuple[float, ...] = key((), "Shares.", Limits(0, below=1))


@dataclass(frozen=True)
class Holder:
    limited: Limited = field(default_factory=Limited)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"size": 0}, "limited.size = 0: it must be at least 1"),
        ({"size": 10}, "limited.size = 10: it must be at most 9"),
        ({"shares": [0, 1]}, "limited.shares = [0.0, 1.0]: each must be below 1"),
        ({"shares": [float("nan")]}, "limited.shares = [nan]: each must be at least 0"),
    ],
)
def test_numbers_have_limits(values: dict[str, Any], sentence: str) -> None:
    check_limits(Holder(Limited(9, (0.0, 0.999))))
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        check_limits(build(Holder, {"limited": values}))
    assert str(raised.value) == sentence


def test_what_toml_cannot_read_is_text() -> None:
    """Whole numbers of thousands of digits, and brackets without an end."""
    for text in ("9" * 5000, "[" * 5000):
        values: dict[str, Any] = {}
        assign(values, f"name={text}")
        assert values == {"name": text}
