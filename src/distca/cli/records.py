"""Plain records of plans, which ``distca.report`` shows and ``--json`` prints."""

import time
from typing import Any

import numpy as np

from distca.dispatch.layout import Layout
from distca.planning.costs.base import CostModel
from distca.planning.devices import Devices
from distca.planning.placement import Placement
from distca.planning.plan import Plan
from distca.planning.spans import Floats, Ints
from distca.planning.tasks import Tasks
from distca.planning.traffic import flows, traffic


def summary_of(plan: Plan) -> dict[str, Any]:
    """Returns the plan's summary and the seconds for the layout of the rank with most traffic."""
    busiest = int(np.argmax(plan.traffic.send + plan.traffic.recv))
    began = time.perf_counter()
    Layout.of(plan, busiest)
    return plan.summary() | {"layout_s": time.perf_counter() - began}


def record_of(
    plan: Plan, given: Placement, cost: CostModel, summary: dict[str, Any]
) -> dict[str, Any]:
    """Compares the plan with attention at home: every task on the worker that holds its queries."""
    at_home = Tasks.at_home(given, plan.reach)
    load = [
        at_home.load_ps(given, plan.reach, direction, given.num_workers)
        for direction in (cost.forward, cost.backward)
    ]
    workers, node = Devices.of(given.num_workers), plan.devices.node
    forward = traffic(at_home, given, plan.shape, node)
    before = {
        "imbalance_each": [workers.imbalance(one) for one in load],
        "bytes_total": forward.total,
        "bytes_send_max": int(forward.send.max()),
        "bytes_recv_max": int(forward.recv.max()),
        "bytes_backward": traffic(at_home, given, plan.shape, node, backward=True).total,
        "tasks": len(at_home),
    }
    after = {"imbalance_each": imbalances(plan)} | {
        key: summary[key] for key in before if key in summary
    }
    missing = np.zeros(plan.devices.num_ranks - given.num_workers)  # idle servers
    return {
        "summary": summary,
        "before": before,
        "after": after,
        "bound": 1.0 + plan.tolerance,
        "load_before": np.stack([np.append(over_mean(workers, one), missing) for one in load]),
        "load_after": np.stack(
            [over_mean(plan.devices, w) for w in (plan.forward_load_ps, plan.backward_load_ps)]
        ),
    }


def comparison_row(plan: Plan, summary: dict[str, Any]) -> dict[str, Any]:
    """Returns a row of ``report.plans.compare_table``."""
    tokens = plan.placement.tokens
    return summary | {
        "imbalance_each": imbalances(plan),
        "tokens_imbalance": float(tokens.max() / max(tokens.mean(), 1.0)),
    }


def imbalances(plan: Plan) -> list[float]:
    return [plan.devices.imbalance(w) for w in (plan.forward_load_ps, plan.backward_load_ps)]


def over_mean(servers: Devices, load: Ints) -> Floats:
    """Returns the finishing time of each rank [ranks], relative to the mean."""
    return servers.finish_ps(load) / max(servers.mean_ps(int(load.sum())), 1.0)


def traffic_matrix(plan: Plan) -> Ints:
    """Returns bytes [sender, receiver] of one layer's forward: q and kv out, o back."""
    matrix = np.zeros((plan.devices.num_ranks, plan.devices.num_ranks), np.int64)
    sent = flows(plan.forward, plan.placement, plan.shape, backward=False)
    np.add.at(matrix, (sent.source, sent.target), sent.out)
    np.add.at(matrix, (sent.target, sent.source), sent.back)
    return matrix
