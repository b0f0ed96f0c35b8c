"""The record of a plan that its page draws adds up to what the plan says of itself."""

from typing import Any

import numpy as np
import pytest

from distca.cli.plan_pieces import pieces_record
from distca.planning.api import place_and_plan, plan
from distca.planning.options import PlanOptions
from distca.planning.placement import Placement
from distca.planning.plan import Plan
from distca.planning.policies import policy_of
from distca.report.pages.plan import plan_page

RANKS = [[65536], [8192, 8192], [4096] * 3, [32768]]
OPTIONS: dict[str, dict[str, Any]] = {
    "in place": {},
    "servers": {"servers": 2, "ranks_per_node": 2},
    "slow": {"speed": [1.0, 0.5, 1.0, 1.0]},
    "window": {"mask": "window:1024"},
    "chunk": {"mask": "chunk:8192"},
}


@pytest.fixture(params=OPTIONS, scope="module")
def made(request: pytest.FixtureRequest) -> Plan:
    return plan(RANKS, PlanOptions(model="llama3-8b", **OPTIONS[request.param]))


def test_pieces_add_up_to_the_loads_and_the_traffic_of_the_plan(made: Plan) -> None:
    record = pieces_record(made.to_json())
    pieces = record["pieces"]
    for way, (seconds, traffic) in enumerate(
        zip(made.seconds, (made.traffic, made.backward_traffic), strict=True)
    ):
        tasks = pieces["tasks"][way]
        computed = np.zeros(made.devices.num_ranks)
        np.add.at(computed, tasks["server"], tasks["seconds"])
        np.testing.assert_allclose(computed, seconds, rtol=1e-3)
        assert computed.max() <= pieces["bound_s"][way] * 1.001
        keys = {}  # the same for all tasks of a document on a server
        for server, document, num_bytes in zip(
            tasks["server"], tasks["document"], tasks["kv_bytes"], strict=True
        ):
            assert keys.setdefault((server, document), num_bytes) == num_bytes
        assert sum(tasks["q_bytes"]) + sum(keys.values()) == traffic.total
    assert record["traffic"].sum() == made.traffic.total
    shards = pieces["shards"]
    held = np.subtract(shards["stop"], shards["start"])
    assert held.sum() == sum(map(sum, RANKS))


def test_the_page_is_one_that_plotly_knows(made: Plan) -> None:
    graph_objects = pytest.importorskip("plotly.graph_objects")
    page = plan_page("name", pieces_record(made.to_json()))
    for section in page.sections:
        if section.figure is not None:
            graph_objects.Figure(section.figure)
    names = [section.name for section in page.sections]
    assert ("nodes" in names) == (made.devices.node.max() > 0)
    assert page.to_json()


def test_the_matrix_of_nodes_has_all_bytes(made: Plan) -> None:
    page = plan_page("name", pieces_record(made.to_json()))
    for section in page.sections:
        if section.name in ("traffic", "nodes"):
            (drawn,) = section.figure["data"]
            unit = {"kB": 1e3, "MB": 1e6, "GB": 1e9}[drawn["colorbar"]["title"]["text"]]
            total = sum(cell or 0 for row in drawn["z"] for cell in row) * unit
            assert total == pytest.approx(made.traffic.total, rel=1e-2)


def test_the_load_before_is_that_of_the_given_placement() -> None:
    given = Placement.from_ranks(RANKS)
    made = place_and_plan(given, policy_of("distca", "balanced"), PlanOptions(model="llama3-8b"))
    before = [[3.0, 0.5, 0.25, 0.25], [3.0, 0.5, 0.25, 0.25]]
    record = pieces_record(made.to_json() | {"load_before": before})
    assert record["load_before"].tolist() == before
    own = pieces_record(made.to_json())["load_before"]
    assert own.max() < 1.5  # of the balanced placement itself


def test_a_plan_whose_profile_is_gone_is_drawn_by_its_pairs(made: Plan) -> None:
    data = made.to_json()
    data["summary"]["cost"] = "gone.json"
    tasks = pieces_record(data)["pieces"]["tasks"][0]
    computed = np.zeros(made.devices.num_ranks)
    np.add.at(computed, tasks["server"], tasks["seconds"])
    np.testing.assert_allclose(computed, made.seconds[0], rtol=1e-3)
