"""Which ranks share a node."""

from __future__ import annotations

import pytest

from distca.runtime.nodes import node_size


@pytest.mark.parametrize(
    ("nodes", "size"),
    [
        ([None] * 6, 6),
        ([0, 0, 0, 0, 1, 1, 1, 1], 4),
        ([0, 0, 0, 0, 1, 1], 4),  # the last node is not full
        ([0, 0, 1, 1, 1, 1], 2),  # a pipeline stage that begins inside a node
        ([0, 0, 0, 1, 1, 2, 2, 2], 1),
        ([0, 1, 2], 1),
    ],
)
def test_ranks_that_share_a_node(nodes: list[int | None], size: int) -> None:
    assert node_size(nodes) == size
