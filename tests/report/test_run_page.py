"""The page of a run has what its records have, and nothing that plotly does not know."""

import math

import numpy as np
import pytest
from report_records import steps, ticks

from distca.report.pages.page import Page
from distca.report.pages.panels import numbers, thin
from distca.report.pages.run import run_page
from distca.report.pages.run_events import Run, events_of
from distca.report.pages.run_ranks import by_rank, merge_columns

LOST = {"rank": 1, "how": "its process ended"}


def section(page: Page, name: str) -> dict:
    (found,) = [one for one in page.sections if one.name == name]
    return found


def trace(page: Page, name: str) -> dict:
    (found,) = [one for one in section(page, "curves").figure["data"] if one["name"] == name]
    return found


def test_every_curve_has_the_values_of_the_records() -> None:
    page = run_page([Run("one", steps(9))])
    for name, key, unit in (
        ("training", "loss", 1),
        ("Tokens per second", "tokens_per_s", 1),
        ("measured", "imbalance_measured", 1),
        ("planned", "imbalance_planned", 1),
        ("exposed communication", "exposed_s", 1),
        ("planning", "planning_waited_s", 1),
        ("Memory of the fullest rank, GiB", "memory_bytes", 1 << 30),
    ):
        drawn = trace(page, name)
        assert drawn["x"] == list(range(9))
        assert drawn["y"] == pytest.approx([one[key] / unit for one in steps(9)], rel=1e-5)
    assert trace(page, "plan rank 0")["y"] == [0.5] * 9
    assert trace(page, "evaluation")["x"] == [3, 7]


def test_figures_are_those_that_plotly_knows() -> None:
    graph_objects = pytest.importorskip("plotly.graph_objects")
    faults = [{"fault": "kill rank 1 step 2", "rank": 1, "step": 2}]
    page = run_page(
        [Run("one", steps(9), faults, ticks={"newest": ticks(8)}), Run("two", steps(5))]
    )
    for one in page.sections:
        if one.figure is not None:
            graph_objects.Figure(one.figure)  # raises for an unknown property
    assert page.to_json()


def test_ticks_are_drawn_as_stages_and_ranks() -> None:
    page = run_page([Run("one", steps(9), ticks={"newest": ticks(8), "slowest": ticks(2)})])
    shown = section(page, "ticks-newest-0")
    assert shown.title == "Ticks of step 8, the newest"
    schedule, attention, waiting = shown.figure["data"]
    assert schedule["text"] == [["F0", "F1", "", "", "B0", "B1"], ["", "F0", "B0", "F1", "B1", ""]]
    assert schedule["z"][1] == [None, 0, 1, 0, 1, None]
    assert attention["z"][2] == pytest.approx([0.006 * (1 + tick) for tick in range(6)])
    assert waiting["z"][0][5] == pytest.approx(0.003)
    assert waiting["text"][1][2] == (
        "tick 2, rank 1, stage 1: B0<br>attention 12 ms, planned 6 ms<br>waiting 3 ms"
        "<br>whole tick 24 ms"
    )
    assert shown.table.rows[4][:3] == ["4", "backward", "B0 B1"]
    assert shown.table.rows[4][5:] == ["1.50", "1.50", "7.5 ms", "server 0"]
    assert section(page, "ticks-slowest-0").title == "Ticks of step 2, the slowest"
    same = run_page([Run("one", steps(9), ticks={"newest": ticks(8), "slowest": ticks(8)})])
    assert [one.name for one in same.sections if one.name.startswith("ticks")] == ["ticks-newest-0"]


def test_ranks_that_idle_in_a_tick_count_and_ranks_that_never_serve_do_not() -> None:
    record = ticks(8)
    for name in ("planned_s", "attention_s"):
        for row in record[name]:
            row[0] = 0.0  # leaves all attention to the others
        record[name][1] = [0.0, 0.0, 0.3]
    table = section(
        run_page([Run("one", steps(9), ticks={"newest": record})]), "ticks-newest-0"
    ).table
    ratios = [row[table.columns.index("worst / mean")] for row in table.rows]
    assert ratios[:2] == ["1.20", "2.00"]


def test_what_has_happened_is_listed_in_order_and_drawn() -> None:
    records = steps(6)
    records[2]["lost_servers"] = [LOST]
    records[4]["skipped"], records[4]["loss"] = True, None
    records[5]["stopped"] = True
    records[5]["joined_servers"] = [{"rank": 3}]
    faults = [
        {"fault": "kill rank 0 step 3", "rank": 0, "step": 3},
        {"recovery": 1, "step": 3},
    ]
    run = Run("one", records, faults)
    kinds = [kind for _, kind, _ in events_of(run)]
    assert kinds == ["lost server", "fault", "recovery", "skipped", "server joined", "stopped"]
    page = run_page([run])
    lines = section(page, "curves").figure["layout"]["shapes"]
    assert [line["x0"] for line in lines] == [2, 3, 4, 5]
    assert trace(page, "lost server")["text"] == ["rank 1: its process ended"]
    assert len(section(page, "events").table.rows) == 6
    assert trace(page, "training")["x"] == [0, 1, 2, 3, 5]  # a loss that is not finite is null


def test_two_runs_are_drawn_over_each_other_and_compared() -> None:
    page = run_page([Run("one", steps(4)), Run("two", steps(8))])
    assert trace(page, "one, training")["x"] == list(range(4))
    assert trace(page, "two, training")["x"] == list(range(8))
    rows = {name: values for name, *values in section(page, "comparison").table.rows}
    assert rows["steps"] == ["4", "8", "2.00x"]
    assert rows["tokens/s"] == ["512", "512", "1.00x"]
    assert {one.name for one in page.sections} >= {"ranks-0", "ranks-1"}


def test_a_run_without_a_step_has_a_page_too() -> None:
    page = run_page([Run("one", [], config={"train": {"steps": 5}})])
    assert page.words[0] == "one has no finished step yet."
    assert page.to_json()


def test_records_of_an_older_version_are_enough() -> None:
    old = [{k: v for k, v in one.items() if k not in ("ranks", "speeds")} for one in steps(3)]
    page = run_page([Run("one", old)])
    assert "ranks-0" not in {one.name for one in page.sections}
    assert trace(page, "training")["x"] == [0, 1, 2]


def test_rows_of_the_heat_map_follow_their_ranks_as_servers_come_and_go() -> None:
    records = steps(7, ranks=3, slow=2)
    for step, change in (
        (1, {"lost_servers": [LOST]}),  # in the step, which was taken again
        (3, {"joined_servers": [{"rank": 3}]}),
        (4, {"left_servers": [{"rank": 3}]}),
    ):
        records[step] |= change
    for step, ranks in ((1, [0, 2]), (2, [0, 2]), (3, [0, 2, 3]), (4, [0, 2])):
        records[step]["ranks"]["attention_s"] = [float(rank) for rank in ranks]
    records[5]["ranks"]["attention_s"] = [0.0, 1.0, 2.0]  # after a restart
    records[6] |= {"lost_servers": [LOST]}  # in the evaluation after the step
    records[6]["ranks"]["attention_s"] = [0.0, 1.0, 2.0]
    no = math.nan
    np.testing.assert_array_equal(
        by_rank(records, ("attention_s",)),
        [
            [0.1, 0, 0, 0, 0, 0, 0],
            [0.1, no, no, no, no, 1, 1],
            [0.2, 2, 2, 2, 2, 2, 2],
            [no, no, no, 3, no, no, no],
        ],
    )


def test_columns_of_a_heat_map_are_means_of_what_is_known() -> None:
    table = np.array([[1.0, 3.0, 5.0], [math.nan, 4.0, math.nan]])
    np.testing.assert_array_equal(merge_columns(table, 2), [[2.0, 5.0], [4.0, math.nan]])
    np.testing.assert_array_equal(merge_columns(table, 3), table)


def test_long_lines_are_thinned_and_keep_their_extremes_and_order() -> None:
    random = np.random.default_rng(0)
    points = [(step, float(value)) for step, value in enumerate(random.normal(size=10_001))]
    points[777] = (777, 99.0)
    kept = thin(points, 200)
    assert len(kept) <= 200
    assert (777, 99.0) in kept
    assert min(points, key=lambda p: p[1]) in kept
    assert kept == sorted(kept)
    assert thin(points[:200], 200) == points[:200]


def test_only_finite_numbers_are_drawn() -> None:
    records = [{"step": n, "a": value} for n, value in enumerate([1, None, math.nan, 2.0, "x"])]
    assert numbers(records, "a") == [(0, 1), (3, 2.0)]
