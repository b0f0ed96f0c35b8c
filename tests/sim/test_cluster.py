"""Machines: what their links carry, where ranks lie, and which numbers are refused."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from sim.tiny import machines

from distca.pipeline.mesh import MeshShape
from distca.planning.costs.profile import Profile
from distca.planning.costs.published import SCALED
from distca.sim.cluster import PRESETS, Link, cluster


def test_a_link_takes_its_latency_and_then_its_bytes() -> None:
    assert Link(100.0, 0.5).seconds(np.array([0.0, 1.0, 250.0])).tolist() == [0.0, 0.51, 3.0]


def test_ranks_lie_on_nodes_in_order() -> None:
    assert machines("none", 8, gpus_per_node=2).node(8, tp=1).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert machines("none", 8, gpus_per_node=4).node(4, tp=2).tolist() == [0, 0, 1, 1]


def test_a_tensor_parallel_group_as_large_as_a_node_is_one_rank_of_it() -> None:
    assert machines("none", 16, gpus_per_node=8).node(2, tp=8).tolist() == [0, 1]


def test_a_rank_is_as_fast_as_its_slowest_gpu() -> None:
    slow = machines("none", 6, slow={2: 0.5, 3: 0.8, 5: 1.5})
    assert slow.speed(3, tp=2).tolist() == [1.0, 0.5, 1.0]
    assert slow.speed(6, tp=1).tolist() == [1.0, 1.0, 0.5, 0.8, 1.0, 1.5]


def test_a_ring_inside_a_node_is_as_fast_as_its_links() -> None:
    nodes = machines("none", 16, gpus_per_node=4)
    for members in (1, 2, 4):
        assert nodes.group_link(members, per_node=4) == nodes.inside


def test_a_ring_across_nodes_comes_in_over_all_ports_of_a_node() -> None:
    """Four ports of 10 are 40 together; of 100 they are more than the links inside carry."""
    slow = machines("none", 16, inside=Link(60.0, 1.0), across=Link(10.0, 2.0))
    assert slow.group_link(16, per_node=4) == Link(40.0, 2.0)
    fast = machines("none", 16, inside=Link(60.0, 1.0), across=Link(100.0, 2.0))
    assert fast.group_link(16, per_node=4) == Link(60.0, 2.0)


@pytest.mark.parametrize("members", [3, 5, 6, 7, 9])
def test_a_ring_that_neither_fills_a_node_nor_nodes_has_one_port_between_them(members: int) -> None:
    """Of groups of three in nodes of four, the second has one rank in the first node."""
    nodes = machines("none", 24, inside=Link(60.0, 1.0), across=Link(10.0, 2.0))
    assert nodes.group_link(members, per_node=4) == Link(10.0, 2.0)


@pytest.mark.parametrize("name", PRESETS)
def test_clusters_that_are_known_by_name_are_usable(name: str) -> None:
    found = cluster(name)
    assert found.name.removesuffix(" by published rates") == name
    assert found.inside.bytes_per_s > found.across.bytes_per_s
    found.check(MeshShape(dp=found.gpus))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpus": 0}, "0 GPUs, 8 in a node: give 1 or more of each"),
        ({"gpus_per_node": 0}, "4 GPUs, 0 in a node: give 1 or more of each"),
        ({"slow": {4: 0.5}}, "GPU 4 of speed 0.5: give a number below 4 and a speed from 1e-06"),
        ({"slow": {-1: 0.5}}, "GPU -1 of speed 0.5: give a number below 4"),
        ({"slow": {0: 0.0}}, "GPU 0 of speed 0.0: give a number below 4 and a speed from 1e-06"),
        ({"slow": {3: 1e-300}}, "GPU 3 of speed 1e-300: give a number below 4 and a speed from"),
        ({"slow": {3: 1e300}}, "GPU 3 of speed 1e+300: give a number below 4 and a speed from"),
        ({"slow": {0: float("nan")}}, "GPU 0 of speed nan"),
        ({"jitter": -0.1}, "jitter = -0.1: it must be at least 0 and below 1"),
        ({"jitter": 1.0}, "jitter = 1.0: it must be at least 0 and below 1"),
        ({"link_jitter": 2.0}, "link_jitter = 2.0: it must be at least 0 and below 1"),
        ({"transfer_sms": 1.0}, "transfer_sms = 1.0: it must be at least 0 and below 1"),
        ({"transfer_sms": -0.1}, "transfer_sms = -0.1: it must be at least 0 and below 1"),
    ],
)
def test_machines_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        machines("none", **{"gpus": 4, **changes})


@pytest.mark.parametrize(
    "numbers",
    [
        (0.0, 0.0), (-1.0, 0.0), (float("nan"), 0.0), (float("inf"), 0.0),
        (1.0, -1e-6), (1.0, float("nan")), (1.0, float("inf")),
    ],
)  # fmt: skip
def test_links_that_cannot_be_are_refused(numbers: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="above 0 and a latency of 0 or more, both finite"):
        Link(*numbers)


def test_an_unknown_cluster_is_told_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'h300' is unknown: choose one of h200, h200-flash, h200"):
        cluster("h300")


def test_sizes_that_do_not_make_the_cluster_are_refused() -> None:
    with pytest.raises(ValueError, match="need 6 ranks, but 8 were started"):
        machines("none", 8).check(MeshShape(dp=3, cp=2))


def test_tensor_parallelism_stays_inside_a_node() -> None:
    with pytest.raises(ValueError, match="tp = 4 with 6 GPUs in a node: tensor parallelism"):
        machines("none", 12, gpus_per_node=6).check(MeshShape(dp=3, tp=4))
    with pytest.raises(ValueError, match="tp = 16 with 8 GPUs in a node"):
        machines("none", 16, gpus_per_node=8).check(MeshShape(tp=16))
    machines("none", 4, gpus_per_node=8).check(MeshShape(tp=4))


def test_other_gpus_are_scaled_by_their_published_rates() -> None:
    ours, theirs = Profile.read("h200"), Profile.read("a100")
    assert theirs.device == "a100, scaled from h200 by published rates"
    assert theirs.linear_tflops == pytest.approx(ours.linear_tflops * 312 / 989)
    assert theirs.forward_tflops[3][5] == pytest.approx(ours.forward_tflops[3][5] * 312 / 989)
    assert theirs.forward_tflops[5][3] is None
    for name, one in PRESETS.items():
        assert one.name.startswith(name)
        assert ("by published rates" in one.name) == (one.profile in SCALED)
        Profile.read(one.profile)
        assert one.inside.bytes_per_s > one.across.bytes_per_s
