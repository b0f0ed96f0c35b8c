"""Profiles as files: they read back as written, and errors are one clear sentence."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distca.planning.api import plan
from distca.planning.costs.choice import cost_model
from distca.planning.costs.profile import HeldOut, MeasuredExchange, Profile
from distca.planning.costs.table import Table, table_cost
from distca.planning.models import model_shape

LLAMA = model_shape("llama3-8b")
CALL = HeldOut((200, 64), (300, 64), 4, 1e-3, 2e-3, 1.1e-3, 1.6e-3)
WHOLE = Profile(
    name="bench",
    queries=(64, 256),
    keys=(64, 1024),
    forward_tflops=((10.0, 20.0), (None, 40.0)),
    backward_tflops=((5.0, 15.0), (None, 30.0)),
    tile=64,
    device="a device",
    backend="sdpa",
    dtype="float32",
    ranks=2,
    heads=8,
    kv_heads=4,
    head_dim=32,
    hidden=256,
    ffn=320,
    date="2026-11-16",
    versions={"torch": "2.13"},
    linear_tflops=55.5,
    sustained=0.75,
    copy_bytes_per_s=1e10,
    exchange=(MeasuredExchange(1000, 1e9), MeasuredExchange(2000, 1.5e9)),
    held_out=(CALL, replace(CALL, repeat=1, forward_s=1.1e-3), replace(CALL, forward_s=2.2e-3)),
)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "new" / "bench.json"
    WHOLE.write(path)
    assert Profile.read(str(path)) == WHOLE
    assert [*path.parent.iterdir()] == [path]  # nothing is left of the writing
    assert '"queries": [64, 256]' in path.read_text()  # for people: a line for a key


def test_a_blank_one_too(tmp_path: Path) -> None:
    nothing = ((None, None), (None, None))
    blank = Profile("blank", (64, 256), (64, 1024), nothing, nothing)
    blank.write(tmp_path / "blank.json")
    assert Profile.read(str(tmp_path / "blank.json")) == blank
    assert blank.missing == [(0, 0), (0, 1), (1, 1)]
    assert (blank.errors("forward"), blank.errors("backward")) == (None, None)


@pytest.mark.parametrize("name", ["h200", "h200-flash"])
def test_shipped_profiles_can_be_read(name: str) -> None:
    profile = Profile.read(name)
    assert profile.name == name
    assert profile.tile == 128


def test_what_another_version_says_more_is_left() -> None:
    assert Profile.from_json({**WHOLE.to_json(), "colour": "red"}) == WHOLE


def test_errors_are_relative_to_what_was_measured() -> None:
    assert [round(call.error("forward"), 9) for call in WHOLE.held_out] == [0.1, 0.0, 0.5]
    assert WHOLE.errors("forward") == pytest.approx({"median": 0.1, "worst": 0.5})
    assert WHOLE.errors("backward") == pytest.approx({"median": 0.2, "worst": 0.2})


def test_rates_are_put_in_their_place() -> None:
    nothing = ((None, None), (None, None))
    blank = Profile("blank", (64, 256), (64, 1024), nothing, nothing)
    one = blank.with_rates(0, 1, 3.0, 2.0)
    assert one.forward_tflops == ((None, 3.0), (None, None))
    assert one.backward_tflops == ((None, 2.0), (None, None))
    assert one.missing == [(0, 0), (1, 1)]


def test_only_the_same_setting_is_gone_on_with() -> None:
    WHOLE.check_continues(replace(WHOLE, name="other", date="later", linear_tflops=None))
    for change, words in (
        ({"device": "H200"}, "device a device, but here it is H200"),
        ({"backend": "fa4"}, "backend sdpa, but here it is fa4"),
        ({"queries": (64, 512)}, "queries 64, 256, but here it is 64, 512"),
        ({"versions": {"torch": "2.14"}}, "versions torch 2.13, but here it is torch 2.14"),
    ):
        with pytest.raises(ValueError, match=f"begun with {words}: choose another --out"):
            WHOLE.check_continues(replace(WHOLE, **change))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": None}, "'name' is missing"),
        ({"tile": 0}, "tile = 0: it must be from 1 to 65536"),
        ({"tile": "big"}, "not usable"),
        ({"tile": 10**400}, "not usable"),
        ({"linear_tflops": -1.0}, "linear_tflops = -1: it must be from 0.0001 to"),
        ({"sustained": 0.0}, "sustained = 0: it must be from 0.01 to 1"),
        ({"sustained": 2.0}, "sustained = 2: it must be from 0.01 to 1"),
        ({"tile": 1 << 40}, r"tile = 1.09951e\+12: it must be from"),
        ({"forward_tflops": [[1e13, 2], [3, 4]]}, r"a rate in TFLOP/s = 1e\+13: it must be"),
        ({"forward_tflops": [[1e-6, 2], [3, 4]]}, "a rate in TFLOP/s = 1e-06: it must be from"),
        ({"copy_bytes_per_s": float("nan")}, "copy_bytes_per_s = nan: it must be from"),
        ({"queries": [64.5, 256]}, "queries = 64.5: it must be a whole number"),
        ({"queries": 64}, "not usable"),
        ({"exchange": [{"bytes": 3}]}, "bytes_per_s"),
        ({"exchange": [3]}, "not usable"),
        ({"held_out": [{"queries": [3]}]}, "'keys'"),
        (
            {"forward_tflops": [[1, 2], [3, float("inf")]]},
            "a rate in TFLOP/s = inf: it must",
        ),
    ],
)
def test_a_bad_file_is_one_sentence(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(WHOLE.to_json() | change))
    with pytest.raises(ValueError, match=words) as caught:
        Profile.read(str(path))
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_the_planner_takes_its_linear_rate_and_its_tile(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    WHOLE.write(path)
    model = cost_model(str(path), LLAMA)
    assert isinstance(model.forward, Table)
    assert (model.linear_tflops, model.forward.tile) == (0.75 * 55.5, 64)
    assert cost_model("h200-flash", LLAMA).linear_tflops > 100
    one, whole = (model.forward.ps(*np.array([[n], [n], [n * (n + 1) // 2]])) for n in (1, 64))
    assert one > 0.7 * whole  # part of a tile takes nearly as long as all of it


def test_parts_of_whole_layers_take_longer_than_parts_alone() -> None:
    task = np.array([[64], [1024], [64 * 1024 - 64 * 63 // 2]])
    whole, alone = (table_cost(replace(WHOLE, sustained=one), LLAMA) for one in (0.75, None))
    for direction in ("forward", "backward"):
        there, here = (getattr(cost, direction).ps(*task) for cost in (whole, alone))
        assert there == pytest.approx(here / 0.75)


def test_a_plan_names_it(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    WHOLE.write(path)
    made = plan([[8192], [1024] * 4], model="llama3-8b", cost=str(path))
    assert made.cost == "bench"
    assert made.imbalance < made.imbalance_before
