"""Costs are whole picoseconds, and close to measurements."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning.oracles import dense_mask
from strategies import COSTS, MASKS

from distca.planning.costs.analytic import KernelCost
from distca.planning.costs.base import PAIRS, PS, CostModel
from distca.planning.costs.choice import cost_model
from distca.planning.costs.profile import Profile
from distca.planning.costs.table import table_cost
from distca.planning.models import ModelShape, model_shape
from distca.planning.spans import as_ints

LLAMA = model_shape("llama3-8b")
WAYS = ("forward", "backward")
SHIPPED = ("h200", "h200-flash")

# Queries, keys, and TFLOP/s forward and backward of flash-attn-4 on an H200, in full batches.
MEASURED = [
    (128, 128, 50, 44),
    (16384, 16384, 659, 558),
    (65536, 65536, 664, 608),
    (128, 16384, 660, 200),
    (256, 16384, 617, 317),
    (512, 16384, 583, 419),
    (1024, 16384, 575, 491),
    (4096, 16384, 593, 562),
]


def price(model: CostModel, way: str, queries: int, keys: int, pairs: int) -> int:
    cost = model.of(backward=way == "backward")
    result = cost.ps(as_ints([queries]), as_ints([keys]), as_ints([pairs]))
    assert result.dtype == np.int64
    return int(result[0])


def causal_pairs(queries: int, keys: int) -> int:
    """Returns the pairs of the last ``queries`` rows of a document of ``keys`` tokens."""
    return queries * (2 * keys - queries + 1) // 2


def tflops(model: CostModel, way: str, queries: int, keys: int) -> float:
    pairs = causal_pairs(queries, keys)
    flops = pairs * 4 * 32 * 128 * (1 if way == "forward" else 2.5)
    return flops / price(model, way, queries, keys, pairs)


def test_pairs_cost_is_two_and_five_picoseconds_a_pair() -> None:
    model = PAIRS
    queries, keys, pairs = as_ints([1, 3, 128]), as_ints([1, 5, 4096]), as_ints([1, 12, 516160])
    assert model.forward.ps(queries, keys, pairs).tolist() == [2, 24, 1032320]
    assert model.backward.ps(queries, keys, pairs).tolist() == [5, 60, 2580800]


def test_pairs_cost_adds_up_under_cutting() -> None:
    seen = dense_mask("causal", 50)
    model = PAIRS
    parts = [
        price(model, "forward", b - a, b, int(seen[a:b].sum())) for a, b in [(0, 17), (17, 50)]
    ]
    assert sum(parts) == price(model, "forward", 50, 50, int(seen.sum())) == 50 * 51


@given(st.data(), st.sampled_from(COSTS), st.sampled_from(WAYS), st.sampled_from(MASKS))
def test_more_queries_cost_more(data: st.DataObject, cost: str, way: str, mask: str) -> None:
    """A task that holds another one, of the same document, is no cheaper.

    Within a tile of queries this holds up to half a tile of pairs: padding rows are priced as the
    mean of the task's own rows, and the last rows of a causal document see more keys than the mean.
    """
    length = data.draw(st.sampled_from([1, 17, 128, 300, 520]))
    points = data.draw(st.lists(st.integers(0, length), min_size=2, max_size=4).map(sorted))
    outer, inner = (points[0], points[-1]), (points[len(points) // 2 - 1], points[len(points) // 2])
    model, costs = cost_model(cost, LLAMA), []
    for start, stop in (outer, inner):
        seen = dense_mask(mask, length)[start:stop]
        keys = int(seen.any(axis=0).sum())
        costs.append(price(model, way, stop - start, keys, int(seen.sum())) if stop > start else 0)
    kernel = getattr(model, way)
    tile = getattr(kernel, "tile", 1)
    slack = kernel.min_ps_per_pair * tile**2 / 2 if inner[1] - inner[0] < tile else 0
    assert costs[0] + slack >= costs[1] >= 0
    if outer[0] < outer[1]:
        assert costs[0] > 0


@pytest.mark.parametrize("cost", ["pairs", "analytic"])
@pytest.mark.parametrize("way", WAYS)
def test_cutting_a_document_never_saves_time(cost: str, way: str) -> None:
    model = cost_model(cost, LLAMA)
    whole = price(model, way, 4096, 4096, causal_pairs(4096, 4096))
    for cut in range(128, 4096, 128):
        head = price(model, way, cut, cut, causal_pairs(cut, cut))
        tail = price(model, way, 4096 - cut, 4096, causal_pairs(4096 - cut, 4096))
        assert head + tail >= whole, cut


@pytest.mark.parametrize("cost", ["pairs", "analytic", *SHIPPED])
@given(queries=st.integers(1, 9000), before=st.integers(0, 30000))
def test_nothing_goes_below_the_stated_least_cost(cost: str, queries: int, before: int) -> None:
    """Lower bounds of traffic depend on this."""
    model = cost_model(cost, LLAMA)
    keys = before + queries
    pairs = causal_pairs(queries, keys)
    least = int(pairs * model.forward.min_ps_per_pair)
    assert price(model, "forward", queries, keys, pairs) >= least


@pytest.mark.parametrize(("queries", "keys", "forward", "backward"), MEASURED)
def test_analytic_is_within_ten_percent_of_the_h200(
    queries: int, keys: int, forward: float, backward: float
) -> None:
    model = cost_model("analytic", LLAMA)
    assert tflops(model, "forward", queries, keys) == pytest.approx(forward, rel=0.10)
    assert tflops(model, "backward", queries, keys) == pytest.approx(backward, rel=0.05)


def test_analytic_knows_that_short_shards_are_dear_in_backward_only() -> None:
    model = cost_model("analytic", LLAMA)
    short, long = ((tflops(model, w, 128, 16384), tflops(model, w, 4096, 16384)) for w in WAYS)
    assert short[0] > 0.9 * short[1]
    assert long[0] < 0.5 * long[1]


def test_analytic_charges_a_whole_tile_for_part_of_one() -> None:
    model = cost_model("analytic", LLAMA)
    one, full, more = (price(model, "forward", q, 16384, 16384 * q) for q in (1, 128, 129))
    assert one > 0.9 * full
    assert more > 1.8 * full


@pytest.mark.parametrize("cost", COSTS)
def test_costs_for_causal_tasks_alone_are_the_same(cost: str) -> None:
    draw = np.random.default_rng(0)
    queries, before = draw.integers(1, 300_000, (2, 5000))
    tasks = queries, before + queries, queries * (2 * before + queries + 1) // 2
    model = cost_model(cost, LLAMA)
    for way in WAYS:
        every, causal = (
            one.of(backward=way == "backward").ps(*tasks)
            for one in (model, model.for_causal_tasks())
        )
        assert np.array_equal(every, causal)


@pytest.mark.parametrize("weight", [1.0, 2.5])
@pytest.mark.parametrize("cost", COSTS)
def test_both_directions_together_cost_their_sum(cost: str, weight: float) -> None:
    draw = np.random.default_rng(0)
    queries, before = draw.integers(1, 300_000, (2, 5000))
    tasks = queries, before + queries, queries * (2 * before + queries + 1) // 2
    model = cost_model(cost, LLAMA)
    expected = weight * model.forward.ps(*tasks) + model.backward.ps(*tasks)
    found = model.both(weight).ps(*tasks)
    assert found.dtype == np.int64
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=2 + weight)


@pytest.mark.parametrize("cost", [*SHIPPED, "analytic"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("window", [128, 512, 4096])
def test_a_window_costs_what_documents_of_twice_its_length_do(
    cost: str, way: str, window: int
) -> None:
    model, length = cost_model(cost, LLAMA), 2 * window

    def of_document(tokens: int) -> int:
        pairs = tokens * window - window * (window - 1) // 2
        return price(model, way, tokens, tokens, pairs)

    documents = 64 * price(model, way, length, length, causal_pairs(length, length))
    assert of_document(64 * length) == pytest.approx(documents, rel=0.15)
    assert of_document(128 * length) == pytest.approx(2 * of_document(64 * length), rel=0.02)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_profile_gives_back_what_was_measured(name: str) -> None:
    profile, model = Profile.read(name), cost_model(name, LLAMA)
    assert not profile.missing
    for way, rates in zip(WAYS, (profile.forward_tflops, profile.backward_tflops), strict=True):
        for queries, row in zip(profile.queries, rates, strict=True):
            for keys, rate in zip(profile.keys, row, strict=True):
                if rate is not None:
                    assert tflops(model, way, queries, keys) == pytest.approx(rate, rel=1e-4)


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize("way", WAYS)
def test_a_shipped_profile_comes_near_calls_that_it_was_not_made_from(name: str, way: str) -> None:
    profile, model = Profile.read(name), cost_model(name, LLAMA)
    errors = []
    for call in profile.held_out:
        tasks = zip(call.queries, call.keys, strict=True)
        ps = sum(price(model, way, q, k, causal_pairs(q, k)) for q, k in tasks)
        predicted = ps * call.repeat / PS
        assert predicted == pytest.approx(getattr(call, f"{way}_predicted_s"), rel=1e-3)
        errors.append(abs(predicted / getattr(call, f"{way}_s") - 1))
    assert len(errors) == 16
    assert median(errors) < 0.03
    assert max(errors) < 0.15  # documents of 432 tokens, and 128 queries (docs/profile.md)


PROFILE: dict[str, Any] = {
    "name": "bench",
    "queries": [64, 256, 1024],
    "keys": [1024, 4096],
    "forward_tflops": [[100, 200], [150, 300], [400, 500]],
    "backward_tflops": [[50, 60], [70, 80], [90, 100]],
}


def table(profile: dict[str, Any] = PROFILE, shape: ModelShape = LLAMA) -> CostModel:
    return table_cost(Profile.from_json(profile), shape)


@pytest.mark.parametrize("row", range(3))
@pytest.mark.parametrize("column", range(2))
def test_a_table_hits_its_grid_points(row: int, column: int) -> None:
    model = table()
    queries, keys = PROFILE["queries"][row], PROFILE["keys"][column]
    pairs = causal_pairs(queries, keys)
    flops = pairs * 4 * 32 * 128
    forward = flops / PROFILE["forward_tflops"][row][column]
    backward = 2.5 * flops / PROFILE["backward_tflops"][row][column]
    assert abs(price(model, "forward", queries, keys, pairs) - forward) <= 1
    assert abs(price(model, "backward", queries, keys, pairs) - backward) <= 1


def test_a_table_lies_between_its_grid_points_and_goes_on_outside() -> None:
    model = table()
    assert 150 < tflops(model, "forward", 512, 1024) < 400
    assert 150 < tflops(model, "forward", 256, 2048) < 300
    assert tflops(model, "forward", 8, 1024) < 50  # overheads per key are shared by fewer rows
    assert tflops(model, "forward", 4096, 16384) == pytest.approx(500, rel=1e-6)
    assert tflops(model, "forward", 64, 65536) == pytest.approx(200, rel=0.02)


@pytest.mark.parametrize("way", WAYS)
@given(queries=st.integers(1, 70000), before=st.integers(0, 140000))
def test_a_kernel_with_costs_per_row_and_key_is_met_between_the_grid_points(
    way: str, queries: int, before: int
) -> None:
    """A table of powers of two gives the analytic form back for tasks of any size."""
    flops = LLAMA.flops_per_pair
    law = CostModel(
        "law",
        forward=KernelCost(flops, 600, 550, 20, 0.0, tile=1),
        backward=KernelCost(2.5 * flops, 600, 300, 245, 0.0, tile=1),
    )
    grid = [2**power for power in range(7, 18)]
    rates = [[tflops(law, way, n, m) if m >= n else None for m in grid] for n in grid]
    profile = {"name": "law", "queries": grid, "keys": grid}
    model = table(profile | {"forward_tflops": rates, "backward_tflops": rates})
    task = (queries, queries + before, causal_pairs(queries, queries + before))
    found, right = (price(one, way, *task) for one in (model, law))
    assert found == pytest.approx(right, rel=0.01)


def test_a_hole_in_a_profile_is_closed_from_its_row() -> None:
    holes = {**PROFILE, "forward_tflops": [[None, 200], [150, None], [400, 500]]}
    model = table(holes)
    assert tflops(model, "forward", 64, 1024) == pytest.approx(200, rel=1e-6)
    assert tflops(model, "forward", 256, 4096) == pytest.approx(150, rel=1e-6)


def test_a_table_is_rescaled_to_other_heads() -> None:
    half = ModelShape("half", 16, 4, 128)
    at = (as_ints([256]), as_ints([4096]), as_ints([10**6]))
    full = table().forward.ps(*at)
    assert table(shape=half).forward.ps(*at) == pytest.approx(full / 2, abs=1)


def changed(**values: object) -> dict[str, object]:
    return {key: value for key, value in {**PROFILE, **values}.items() if value is not ...}


@pytest.mark.parametrize(
    ("profile", "message"),
    [
        (changed(keys=...), "'keys'"),
        (changed(name=...), "'name'"),
        (changed(backward_tflops=...), "'backward_tflops'"),
        (changed(queries=[64, 256]), "rates of shape"),
        (
            changed(queries=[256, 64, 1024]),
            "queries = .* positive values in ascending order",
        ),
        (changed(keys=[0, 4096]), "keys = .* positive values in ascending order"),
        (changed(keys=["a", "b"]), "not usable"),
        (
            changed(forward_tflops=[[0, 200], [150, 300], [400, 500]]),
            "a rate in TFLOP/s = 0: it must be from",
        ),
        (changed(forward_tflops=[[None, None], [150, 300], [400, 500]]), "there is no rate for 64"),
        (changed(forward_tflops=[[1, 2], [3]]), "not usable"),
        (changed(forward_tflops="fast"), "not usable"),
    ],
)
def test_a_bad_profile_is_one_clear_sentence(
    profile: dict[str, object], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(profile))
    with pytest.raises(ValueError, match=message) as caught:
        cost_model(str(path), LLAMA)
    assert "\n" not in str(caught.value)
    assert "the profile is not usable" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"is not JSON"),
        ("[1, 2]", "is not a JSON object"),
        ("", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_a_file_that_is_no_profile_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        cost_model(str(path), LLAMA)


@pytest.mark.parametrize("name", ["h300", "no/such/file.json", ".", "x" * 300])
def test_an_unknown_cost_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is unknown: use pairs, analytic"):
        cost_model(name, LLAMA)


def test_a_cost_model_of_ones_own_is_taken_as_it_is() -> None:
    model = replace(PAIRS, name="mine")
    assert cost_model(model, LLAMA) is model


@pytest.mark.parametrize("cost", COSTS)
def test_many_tasks_cost_what_each_costs(cost: str) -> None:
    model = cost_model(cost, LLAMA)
    shapes: Sequence[tuple[int, int]] = [(q, k) for q, k, *_ in MEASURED]
    queries, keys = as_ints([q for q, _ in shapes]), as_ints([k for _, k in shapes])
    pairs = as_ints([causal_pairs(q, k) for q, k in shapes])
    one_by_one = [price(model, "forward", *row) for row in zip(queries, keys, pairs, strict=True)]
    assert model.forward.ps(queries, keys, pairs).tolist() == one_by_one


def test_shipped_profiles_are_read_once_and_files_each_time(tmp_path: Path) -> None:
    assert cost_model("h200", LLAMA) is cost_model("auto", LLAMA)
    file = tmp_path / "mine.json"
    profile = Profile.read("h200")
    profile.write(file)
    before = cost_model(str(file), LLAMA)
    replace(profile, linear_tflops=1.0).write(file)
    assert before.linear_tflops == profile.linear_tflops
    assert cost_model(str(file), LLAMA).linear_tflops == 1.0
