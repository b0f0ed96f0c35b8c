"""Traffic that is added up by ranks, against the flows between pairs of ranks."""

import numpy as np
import pytest
from hypothesis import given, settings
from strategies import Batch, batches

from distca.planning.spans import Ints
from distca.planning.traffic import Flows, flows, traffic


def sent_and_received(pairs: Flows, num_ranks: int) -> tuple[Ints, Ints]:
    """[ranks] Adds up flows, out and back."""
    send, recv = np.zeros((2, num_ranks), np.int64)
    for source, target, num_bytes in (
        (pairs.source, pairs.target, pairs.out),
        (pairs.target, pairs.source, pairs.back),
    ):
        np.add.at(send, source, num_bytes)
        np.add.at(recv, target, num_bytes)
    return send, recv


@settings(deadline=None, max_examples=50)
@given(batch=batches().filter(lambda batch: "memory_bytes" not in batch.options))
@pytest.mark.parametrize("backward", [False, True])
def test_traffic_is_the_sum_of_flows(batch: Batch, backward: bool) -> None:
    plan = batch.plan()
    tasks, ranks = plan.backward if backward else plan.forward, plan.devices.num_ranks
    for node in (np.zeros(ranks, np.int64), np.arange(ranks) // 2):
        found = traffic(tasks, plan.placement, plan.shape, node, backward=backward)
        pairs = flows(tasks, plan.placement, plan.shape, backward=backward)
        send, recv = sent_and_received(pairs, ranks)
        crossing = node[pairs.source] != node[pairs.target]
        assert found.send.tolist() == send.tolist()
        assert found.recv.tolist() == recv.tolist()
        assert found.cross_node == int((pairs.out + pairs.back)[crossing].sum())
